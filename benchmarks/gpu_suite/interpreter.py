"""Switches on Triton's interpreter, which stands in for a GPU in rehearsals and tests."""

from functools import cache
from typing import Any


@cache
def mend_interpreter() -> None:
    """Repairs the interpreter of Triton 3.6, once a process: four things that the compiler can do, and its speed.

    A loop's bound that was read from memory is an array of one number to it, of which NumPy makes no integer from 2.4
    on. It keeps bfloat16 as its bits, and multiplies those in `tl.dot`. Products of more rows add up in another order
    on some processors, so they are added in float64 here. And NumPy warns of overflow, which a GPU passes over in
    silence: tokens that pad a pass are computed with whatever stands in their rows.

    At each launch and at each call of a device function, the interpreter replaces all functions of Triton's language.
    This takes longer than most kernels of a test. Here the functions stay replaced: no kernel can be compiled in this
    process afterwards, as in any process with TRITON_INTERPRET=1. Two more things take half of what is left: a table of
    dtypes that is made for every value, and the types of all sizes of a shape, which nothing reads.
    """
    try:
        import numpy
        import triton
        from triton.runtime import interpreter
    except ImportError:
        return
    numpy.seterr(all="ignore")
    language, module = triton.language, interpreter
    patch = module._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def multiply(self: Any, a: Any, b: Any, addend: Any, *_: Any) -> Any:
        a, b = (self.cast_impl(x, language.float32) if x.dtype.scalar == language.bfloat16 else x for x in (a, b))
        product = numpy.matmul(a.data, b.data, dtype=numpy.float64) + addend.data
        return module.TensorHandle(product.astype(addend.data.dtype), addend.dtype.scalar)

    patch_language, patched = module._patch_lang, set[Any]()

    @cache
    def patch_once(function: Any) -> Any:
        """Replaces what the function's modules see; returns an empty scope, which restores nothing."""
        seen = {each for each in function.__globals__.values() if each is language or each is language.core}
        if not seen <= patched:
            empty_scope.append(type(patch_language(function))())
            patched.update(seen)
        return empty_scope[0]

    empty_scope: list[Any] = []
    module._patch_lang = patch_once
    module._patch_lang_tensor = patch_and_mend
    module.InterpreterBuilder.create_dot = multiply
    numpy_dtype, make_tuple = cache(module._get_np_dtype), language.core.tuple.__init__

    def make_without_type(self: Any, args: Any, type: Any = None) -> None:  # noqa: A002 - Triton's name
        self.values, self.kind = list(args), None
        if type is not None:
            make_tuple(self, args, type)

    def kind_of(self: Any) -> Any:
        self.kind = self.kind or language.core._type_for_tuple_values(self.values)
        return self.kind

    def numpy_dtype_of(dtype: Any) -> Any:
        return numpy_dtype(language.uint64 if dtype.scalar.is_ptr() else dtype.scalar)

    module._get_np_dtype = numpy_dtype_of
    language.core.tuple.__init__ = make_without_type
    language.core.tuple.type = property(kind_of, lambda self, kind: setattr(self, "kind", kind))
