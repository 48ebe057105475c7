"""Triton's interpreter, made quicker for tests and mended."""

import numpy
from triton import language
from triton.language import semantic
from triton.runtime import interpreter


def patch() -> None:
    """Makes all changes of this module."""
    for change in (
        *(patch_once_per_launch, patch_comparisons, patch_overflow, patch_bfloat16),
        *(patch_types, patch_operands, patch_builtins),
    ):
        change()


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


def patch_bfloat16() -> None:
    """Rounds float32 to the nearest bfloat16, as a GPU does; the interpreter cuts the last 16 bits off."""
    convert = interpreter._convert_float

    def convert_float(values, of, to, rounding_mode):
        if (of, to) == (language.bfloat16, language.float32):
            return values.view(numpy.uint16).astype(numpy.uint32) << 16
        if (of, to) != (language.float32, language.bfloat16):
            return convert(values, of, to, rounding_mode)
        bits = values.view(numpy.uint32)
        rounded = bits + (0x7FFF + (bits >> 16 & 1))  # to even between two
        return numpy.where(numpy.isnan(values), bits | 0x400000, rounded).astype(numpy.uint32) >> 16

    def as_words(values, of, to, rounding_mode):
        words = convert_float(values, of, to, rounding_mode)
        return words.astype(numpy.uint16) if to == language.bfloat16 else words

    interpreter._convert_float = as_words


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
    of_blocks: dict[tuple[object, ...], language.tuple] = {}

    def numpy_dtype(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = of_numpy(dtype)
        return dtypes[name]

    def make_once(self, element_ty, shape):
        sizes = shape.values if type(shape) is language.tuple else shape
        key = (element_ty.name, *sizes)
        known = blocks.get(key)
        if known is not None:
            vars(self).update(known, element_ty=element_ty)
            return
        make(self, element_ty, shape)
        if all(type(size) is int for size in sizes):
            self.shape = of_blocks.setdefault(key[1:], self.shape)
            blocks[key] = dict(vars(self))

    make_tensor = language.tensor.__init__
    shapes: dict[tuple[object, ...], dict[str, object]] = {}

    def make_tensor_once(self, handle, kind):
        shape = tuple(kind.shape) if kind.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, kind)
            shapes[shape] = {"shape": self.shape, "numel": self.numel}
        else:
            vars(self).update(shapes[shape], handle=handle, type=kind, dtype=kind.scalar)

    equal = language.dtype.__eq__
    language.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    interpreter._get_np_dtype = numpy_dtype
    language.block_type.__init__ = make_once
    language.tensor.__init__ = make_tensor_once


def patch_operands() -> None:
    """Lets operands of one type and shape be, which Triton compares and converts at every operation."""
    of_values = semantic.TritonSemantic
    check, broadcast = of_values.binary_op_type_checking_impl, of_values.broadcast_impl_value

    def broadcast_unlike(self, left, right):
        # Blocks of one shape have the same tuple: see patch_types.
        shapes = [each.type.shape if each.type.is_block() else None for each in (left, right)]
        return (left, right) if shapes[0] is shapes[1] else broadcast(self, left, right)

    def check_unlike(self, left, right, *settings):
        is_division = len(settings) > 3  # which takes halves to float32
        if type(left) is type(right) is language.tensor and not is_division:
            kind = left.type.scalar
            if kind is right.type.scalar and not kind.is_ptr():
                return broadcast_unlike(self, left, right)
        return check(self, left, right, *settings)

    of_values.broadcast_impl_value = broadcast_unlike
    of_values.binary_op_type_checking_impl = check_unlike


def patch_builtins() -> None:
    """Lets the interpreter call the functions of Triton's language without what asks who calls them."""
    attach = interpreter._patch_attr

    def attach_bare(place, name, member, *others):
        attach(place, name, getattr(member, "__wrapped__", member), *others)

    interpreter._patch_attr = attach_bare
