"""Triton's interpreter, made quicker for tests."""

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
