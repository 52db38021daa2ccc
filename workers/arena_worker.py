"""The part of vLLM's worker class that turns references into tensors.

Runs in the process of the model runner. Requests carry references (``transfer.pack``);
just before the forward pass they become tensors over the frontend's shared memory, which
this process has mapped. Nothing is copied and nothing is processed.

vLLM names relied on: SchedulerOutput.scheduled_new_reqs[*].mm_features[*].data, and that
``worker_cls`` names the class whose ``execute_model`` the executor calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transfer.arena_view import ArenaView
from transfer.errors import TransferError
from transfer.pack import is_packed, read_reference, resolve
from transfer.parent_death import die_with_parent
from transfer.tensor_ref import ArenaId
from workers.embedding_connector import fetch_embeddings
from workers.engine_polling import nap_instead_of_polling

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput

    class _Base:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def execute_model(self, scheduler_output: SchedulerOutput) -> Any: ...
else:
    _Base = object


class ArenaReader(_Base):
    """Mixed into vLLM's worker classes, before them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        nap_instead_of_polling()  # where processes are spawned, nothing is inherited
        super().__init__(*args, **kwargs)
        self._arenas: dict[str, ArenaView] = {}

    def attach_arena(self, name: str, nonce: bytes) -> str:
        """Map a frontend's arena. Returns why not, or nothing when it worked."""
        arena = ArenaId(name, nonce)
        if name in self._arenas and self._arenas[name].id == arena:
            return ""
        try:
            view = self._open_arena(arena)
        except (TransferError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        self.detach_arena(name)
        self._arenas[name] = view
        return ""

    def detach_arena(self, name: str) -> None:
        """Unmap a lost frontend's arena, once none of its requests is left."""
        if (view := self._arenas.pop(name, None)) is not None:
            self._close_arena(view)

    def _open_arena(self, arena: ArenaId) -> ArenaView:
        return ArenaView(arena)

    def _close_arena(self, view: ArenaView) -> None:
        view.close()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            request.mm_features = [self._resolved(f) for f in request.mm_features]
        fetch_embeddings(scheduler_output)
        return super().execute_model(scheduler_output)

    def _resolved(self, feature: MultiModalFeatureSpec) -> MultiModalFeatureSpec:
        """The feature with its tensors in place.

        A reference that cannot be read raises and ends the engine: the worker process
        has checked it on arrival and its bytes are leased, so this is a broken promise,
        and an answer without the image would be worse than none.
        """
        if feature.data is None or not is_packed(feature.data):
            return feature
        reference = read_reference(feature.data)
        view = self._arenas[reference.entry.arena]
        memory = view.read(reference.entry)
        return replace(feature, data=resolve(feature.data, memory, reference))
