"""Switches on Triton's interpreter, which stands in for a GPU in rehearsals and tests."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def mend_interpreter() -> None:
    """Repairs three things that the interpreter of Triton 3.6 cannot do, and the compiler can; once a process.

    A loop's bound that was read from memory is an array of one number to it, of which NumPy makes no integer from 2.4
    on. It keeps bfloat16 as its bits, and multiplies those in `tl.dot`. And NumPy warns of overflow, which a GPU passes
    over in silence: tokens that pad a pass are computed with whatever stands in their rows.
    """
    try:
        import numpy
        import triton
        from triton.runtime import interpreter
    except ImportError:
        return
    numpy.seterr(all="ignore")
    language, module = triton.language, interpreter
    patch, multiply = module._patch_lang_tensor, module.InterpreterBuilder.create_dot

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def multiply_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, language.float32) if x.dtype.scalar == language.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *rest)

    module._patch_lang_tensor = patch_and_mend
    module.InterpreterBuilder.create_dot = multiply_bfloat16
