"""A template whose processor does what the bytes of an "image" tell it to.

    python -m tests.frontend.preprocess.fake_template FD
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.processing.processor import (
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    UpdateMode,
)

from frontend.preprocess.item_processor import Unreadable
from frontend.preprocess.messages import Media
from frontend.preprocess.template import run
from tests.fakes import make_item

MODEL = "model"
UPDATES = [
    ResolvedPromptUpdate(
        modality="image",
        item_idx=0,
        mode=UpdateMode.REPLACE,
        target=[7],
        content=PromptUpdateDetails.from_seq([9, 9, 9]),
    )
]


def item_of(number: int) -> MultiModalKwargsItem:
    return make_item(float(number))


class Obedient:
    """Commands: ``VERB ARGUMENT``; every other text is a number of an item."""

    def process(
        self, modality: str, media: Media, processor_options: Any
    ) -> tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]:
        verb, _, argument = media.data.decode().partition(" ")
        match verb:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die-once":
                if not Path(argument).exists():
                    Path(argument).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return item_of(1), UPDATES
            case "sleep":
                signal.pause()
            case "slow":
                time.sleep(0.02)
                return item_of(int(argument)), UPDATES
            case "wait":  # until somebody writes to a named pipe
                with open(argument, "rb") as pipe:
                    return item_of(int(pipe.read())), UPDATES
            case "count":
                with open(argument, "ab") as file:
                    file.write(b".")
                return item_of(1), UPDATES
            case "refuse":
                raise Unreadable(f"Failed to load image: {argument}")
            case "raise":
                raise RuntimeError(argument)
            case "small":
                item = item_of(1)
                return MultiModalKwargsItem({"grid": item["image_grid_thw"]}), UPDATES
        return item_of(int(verb)), UPDATES


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        run(control, lambda arguments: (Obedient(), MODEL))
