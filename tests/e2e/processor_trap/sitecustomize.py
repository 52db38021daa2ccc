"""Makes Hugging Face processors raise, once a flag file says so, and notes encoder runs.

Python imports this by its name in every process whose PYTHONPATH holds this directory.
Where transformers' processors are imported, a line with the process id and its title goes
to ``processors-trapped``; while ``processors-forbidden`` exists, calling one raises.
What vLLM's model runner puts into its encoder cache because it has computed it goes to
``encoder-runs``, one line each: process id and identifier.
All lie in the directory that FOVEAL_PROCESSOR_TRAP names.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

TRAPPED = {
    "transformers.processing_utils": ("ProcessorMixin",),
    "transformers.image_processing_utils": ("BaseImageProcessor",),
    "transformers.video_processing_utils": ("VideoProcessorMixin",),
}
RUNNER = "vllm.v1.worker.gpu_model_runner"
DIRECTORY = Path(os.environ["FOVEAL_PROCESSOR_TRAP"])


def forbid(cls):
    call = cls.__call__

    @functools.wraps(call)
    def call_unless_forbidden(self, *args, **kwargs):
        if (DIRECTORY / "processors-forbidden").exists():
            raise RuntimeError(f"{type(self).__name__} called in process {os.getpid()}")
        return call(self, *args, **kwargs)

    cls.__call__ = call_unless_forbidden


def note_encoder_runs(cls):
    keep = cls._cache_encoder_output

    @functools.wraps(keep)
    def keep_and_note(self, mm_hash, *args, **kwargs):
        with (DIRECTORY / "encoder-runs").open("a") as log:
            log.write(f"{os.getpid()} {mm_hash}\n")
        return keep(self, mm_hash, *args, **kwargs)

    cls._cache_encoder_output = keep_and_note


class TrappingLoader(importlib.abc.Loader):
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        if module.__name__ == RUNNER:
            note_encoder_runs(module.GPUModelRunner)
            return
        for name in TRAPPED[module.__name__]:
            forbid(getattr(module, name))
        with (DIRECTORY / "processors-trapped").open("a") as log:
            log.write(f"{os.getpid()} {module.__name__}\n")


class TrappingFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in TRAPPED and name != RUNNER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = TrappingLoader(spec.loader)
        return spec


sys.meta_path.insert(0, TrappingFinder())
