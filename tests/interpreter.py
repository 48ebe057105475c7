"""Triton's interpreter, made quicker for tests and mended."""

import numpy
from triton import language
from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """Lets the interpreter replace the functions of Triton's language once per launch.

    It does so again for every call of a function within a kernel, which is a third of its time.
    """
    launch = interpreter.GridExecutor.__call__
    replaced: set[tuple[bool, bool]] = set()

    def launch_anew(self, *args, **kwargs):
        replaced.clear()
        return launch(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        modules = self.fn.__globals__.values()
        spaces = any(m is language for m in modules), any(m is language.core for m in modules)
        if spaces not in replaced:
            interpreter._patch_lang(self.fn)
            replaced.add(spaces)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call


def patch_comparisons() -> None:
    """Types the results of comparisons as masks; Triton 3.8 and 3.9 make int32 of those of scalars."""
    compute = interpreter.InterpreterBuilder.binary_op

    def binary_op(self, left, right, function):
        result = compute(self, left, right, function)
        if result.data.dtype == numpy.bool_:
            result.dtype = language.int1
        return result

    interpreter.InterpreterBuilder.binary_op = binary_op


def patch_overflow() -> None:
    """Lets the interpreter not ask whether integers overflow: only its debug mode looks at the answers."""
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    assert not options.debug
    interpreter.interpreter_builder.options = options


def patch_types() -> None:
    """Lets the interpreter remember what it makes of types and shapes, anew at every operation."""
    of_numpy, make = interpreter._get_np_dtype, language.block_type.__init__
    dtypes: dict[str, numpy.dtype] = {}
    blocks: dict[tuple[object, ...], dict[str, object]] = {}

    def numpy_dtype(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = of_numpy(dtype)
        return dtypes[name]

    def make_once(self, element_ty, shape):
        key = (element_ty.name, *shape)
        if any(type(size) is not int for size in shape):
            make(self, element_ty, shape)
        elif key not in blocks:
            make(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(blocks[key], element_ty=element_ty)

    make_tensor = language.tensor.__init__
    shapes: dict[tuple[object, ...], dict[str, object]] = {}

    def make_tensor_once(self, handle, kind):
        shape = tuple(kind.shape) if kind.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, kind)
            shapes[shape] = {"shape": self.shape, "numel": self.numel}
        else:
            vars(self).update(shapes[shape], handle=handle, type=kind, dtype=kind.scalar)

    interpreter._get_np_dtype = numpy_dtype
    language.block_type.__init__ = make_once
    language.tensor.__init__ = make_tensor_once
