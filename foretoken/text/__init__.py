"""Text and token ids: prompts, chats, a tokenizer with checks, and text as it comes."""
