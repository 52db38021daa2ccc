"""Goes into the checkpoint, as the code of such a processor does there.

It makes what the model takes: a picture as a whole and in two halves, each 336 pixels wide
and high. Published processors cut larger pictures into more pieces.
"""

from typing import ClassVar

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

SIDE = 336
TOKENS = 144
"""Of a piece, without those that end its rows."""
MOST_PICTURES = 20


def pieces_of(width, height):
    """How many pieces a picture is cut into, downwards and across."""
    return (1, 2) if width >= height else (2, 1)


class Phi3VImageProcessor(BaseImageProcessor):
    model_input_names: ClassVar = ["pixel_values", "image_sizes"]

    def preprocess(self, images, return_tensors=None, **options):
        """Return pixels (pictures, 3 pieces, 3, side, side) and sizes (pictures, 2)."""
        pictures, sizes = [], []
        for image in images if isinstance(images, (list, tuple)) else [images]:
            down, across = pieces_of(*image.size)
            whole = self._pixels(image, SIDE, SIDE)
            cut = self._pixels(image, across * SIDE, down * SIDE)
            rows = np.split(cut, down, axis=1)
            pieces = [piece for row in rows for piece in np.split(row, across, axis=2)]
            pictures.append(np.stack([whole, *pieces]))
            sizes.append([down * SIDE, across * SIDE])
        pixels = torch.tensor(np.stack(pictures))
        return BatchFeature({"pixel_values": pixels, "image_sizes": torch.tensor(sizes)})

    def _pixels(self, image, width, height):
        pixels = np.asarray(image.convert("RGB").resize((width, height)), np.float32)
        return (pixels / 127.5 - 1).transpose(2, 0, 1)


class Phi3VProcessor(ProcessorMixin):
    attributes: ClassVar = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor, tokenizer, chat_template=None, **options):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.img_tokens = [f"<|image_{number + 1}|>" for number in range(MOST_PICTURES)]

    def calc_num_image_tokens_from_image_size(self, width, height):
        down, across = pieces_of(width, height)
        return (down * across + 1) * TOKENS + 1 + (down + 1) * 12

    def __call__(self, text=None, images=None, return_tensors=None, **options):
        made = {} if images is None else dict(self.image_processor.preprocess(images))
        if text is not None:
            made |= self.tokenizer(text, return_tensors=return_tensors)
        return BatchFeature(made)
