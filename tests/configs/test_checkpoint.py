"""The demo checkpoint: complete, reproducible, printable, and not blind."""

from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from configs.demo.checkpoint import RECIPE_STAMP, write_checkpoint

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("demo") / "checkpoint"
    assert write_checkpoint(target)
    return target


@cache
def load(checkpoint: Path) -> tuple[Qwen2_5_VLForConditionalGeneration, AutoProcessor]:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype="float32")
    return model.eval(), AutoProcessor.from_pretrained(checkpoint)


def answer(checkpoint: Path, text: str, *images: Image.Image) -> str:
    model, processor = load(checkpoint)
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(text=[prompt], images=list(images) or None, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    [written] = processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])
    return written


def plain(colour: str) -> Image.Image:
    return Image.new("RGB", (84, 56), colour)


def test_an_up_to_date_checkpoint_is_left_alone(checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").stat()
    assert not write_checkpoint(checkpoint)
    assert (checkpoint / "model.safetensors").stat() == before


def test_one_of_an_older_recipe_is_replaced_as_a_whole(
    checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / RECIPE_STAMP).write_text("older\n")
    (target / "stale.json").touch()
    assert write_checkpoint(target)
    assert sorted(tmp_path.iterdir()) == [target]
    assert not (target / "stale.json").exists()
    for file in checkpoint.iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes(), file.name


def test_text_of_any_kind_survives_the_tokenizer(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = 'Grüße, {"a": [1, 2]}\n\t日本 \U0001f441'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vision_markers_are_single_tokens_that_the_config_names(checkpoint: Path) -> None:
    model, processor = load(checkpoint)
    tokenizer = processor.tokenizer
    assert tokenizer.encode("<|image_pad|>") == [model.config.image_token_id]
    assert tokenizer.encode("<|video_pad|>") == [model.config.video_token_id]
    assert tokenizer.encode("<|im_end|>") == [model.config.text_config.eos_token_id]


def test_the_chat_template_knows_pictures_and_tools(checkpoint: Path) -> None:
    _, processor = load(checkpoint)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Well?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}],
        },
        {"role": "tool", "content": "a cat"},
    ]
    prompt = processor.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True)
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>Well?<|im_end|>" in prompt
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\na cat\n</tool_response><|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


def test_answers_are_printable(checkpoint: Path) -> None:
    for text in ("Hello", "Tell me a story about a whale."):
        written = answer(checkpoint, text)
        assert len(written) == 12
        assert written.isascii() and written.isprintable()


def test_answers_depend_on_every_picture_and_their_order(checkpoint: Path) -> None:
    pictures = {colour: plain(colour) for colour in ("red", "darkred", "blue", "white")}
    seen = {answer(checkpoint, "What is it?", picture) for picture in pictures.values()}
    red, blue = pictures["red"], pictures["blue"]
    seen |= {answer(checkpoint, "What is it?", *two) for two in ((red, blue), (blue, red))}
    assert len(seen) == 6


def test_large_pictures_are_scaled_down(checkpoint: Path) -> None:
    _, processor = load(checkpoint)
    inputs = processor.image_processor(Image.new("RGB", (4000, 3000)), return_tensors="pt")
    assert int(inputs["image_grid_thw"].prod()) * 14 * 14 <= 1003520
