"""The forms of a prompt, where vLLM has them: `from foretoken.inputs import TokensPrompt`."""

from foretoken.text.prompts import Prompt as PromptType
from foretoken.text.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
