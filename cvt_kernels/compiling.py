"""Triton kernels that are compiled without a launch, into Triton's cache, where their launches find them."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any, NamedTuple

from . import caller, launching


class TritonKernel(NamedTuple):
    """A Triton kernel specialized for some arguments; plain data, which can go to another process.

    Attributes:
        arch: Compute capability, 90 for sm_90.
        module: The module of the kernel.
        name: The name of the kernel in its module.
        signature, constants, attributes: Triton's description of the arguments, the last two by the path to
            an argument: its index, then indices within tuples.
        options: Triton's options, such as ``num_warps``.
    """

    arch: int
    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    def compile(self) -> Any:
        """Compiles the kernel into Triton's cache, under the key that a launch looks for, or finds it there.

        Raises:
            RuntimeError: It does not compile.
        """
        import triton

        try:
            return triton.compile(self.source(), target=self.target(), options=self.options)
        except Exception as error:  # Triton's own do not all survive the way to another process
            if caller.is_foreign(error):
                raise
            raise RuntimeError(f"{self.name} does not compile for sm_{self.arch}: {error}") from error

    def compile_into_cache(self) -> None:
        """Compiles the kernel, and the launcher in C that Triton up to 3.6 has for each signature.

        Raises:
            RuntimeError: It does not compile.
        """
        compiled = self.compile()
        driver = importlib.import_module("triton.backends.nvidia.driver")
        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(compiled.src, compiled.metadata)

    def is_cached(self) -> bool:
        """Returns whether Triton's cache has it; False if this version of Triton does not tell."""
        try:
            from triton._C.libtriton import get_cache_invalidating_env_vars
            from triton.compiler import make_backend
            from triton.runtime.cache import get_cache_key, get_cache_manager

            backend, source = make_backend(self.target()), self.source()
            options = backend.parse_options(dict(self.options))
            key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
            manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
            return bool(manager.get_group(f"{source.name[:150]}.json"))
        except Exception as error:  # these are Triton's own, and a launch will tell what is wrong
            if caller.is_foreign(error):
                raise
            return False

    def source(self) -> Any:
        """Returns Triton's description of the kernel."""
        kernel = getattr(importlib.import_module(self.module), self.name)
        launching.settle_key(kernel)
        return source_of(kernel, self.signature, self.constants, self.attributes)

    def target(self) -> Any:
        """Returns Triton's description of the GPU."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def source_of(kernel: Any, *facts: dict[Any, Any]) -> Any:
    """Returns the source of a kernel in Triton or Gluon, by its signature, constants and attributes."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, *facts)
    from triton.compiler import ASTSource

    return ASTSource(kernel, *facts)


def specialize(launch: launching.Launch, arch: int) -> TritonKernel:
    """Returns the kernel of a launch, specialized as Triton specializes it for these arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launch.kernel, make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    _, signature, constants, attributes = kernel._pack_args(
        backend, launch.options, bound, specialization, {}
    )
    names = kernel.__module__, kernel.__name__
    return TritonKernel(arch, *names, signature, constants, attributes, launch.options)
