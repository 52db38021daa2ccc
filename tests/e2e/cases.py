"""Requests of every kind, each of which must be answered as plain vLLM answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tests.e2e.fleet import MODEL
from tests.e2e.pictures import animated, data_url, encoded, pattern, photograph, turned

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
)


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


Part = str | dict[str, Any]


def shown(image: Image.Image, form: str = "PNG", **options: Any) -> dict[str, Any]:
    """The part of a message that shows ``image``."""
    return shown_as(encoded(image, form, **options), form)


def shown_as(content: bytes, form: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content, form)}, **more}


def user(*parts: Part) -> dict[str, Any]:
    """What a user says; text may stand for its part."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": content}


def says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def chat_body(*messages: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A chat that tells all about its answer's tokens."""
    return {
        "model": MODEL,
        "messages": list(messages),
        "max_tokens": 10,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        **options,
    }


def completion_body(prompt: Any, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 10,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
        **options,
    }


def responses_body(content: Any, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "input": content, "max_output_tokens": 10, "temperature": 0, **options
    }


def messages_body(*messages: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "messages": list(messages), "max_tokens": 10, "temperature": 0,
        **options,
    }


QUESTION = user("What is to be seen here? ", shown(pattern(200, 120)))
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED_WEATHER = {"type": "function", "function": {"name": "weather"}}
ANIMAL = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
ANIMAL_FORMAT = {
    "type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL, "strict": True}
}

FORMS: dict[str, dict[str, Any]] = {
    "png": shown(pattern(64, 64)),
    "jpeg": shown(pattern(300, 40), "JPEG", quality=80),
    "webp": shown(pattern(120, 90), "WEBP", quality=70),
    "lossless_webp": shown(pattern(90, 120), "WEBP", lossless=True),
    "bmp": shown(pattern(75, 75), "BMP"),
    "gif": shown(pattern(80, 60), "GIF"),
    "animated_gif": shown_as(animated(pattern(80, 60, 1), pattern(80, 60, 2)), "GIF"),
    "palette": shown(pattern(100, 50).convert("P", palette=Image.Palette.ADAPTIVE)),
    "alpha": shown(photograph("logo.png")),
    "gray": shown(photograph("camera.png")),
    "gray_with_alpha": shown(pattern(70, 70).convert("LA")),
    "one_bit": shown(pattern(70, 70).convert("1")),
    "cmyk_jpeg": shown(pattern(96, 64).convert("CMYK"), "JPEG"),
    "turned_by_exif": shown_as(turned(pattern(160, 80), 6), "JPEG"),
    "flipped_by_exif": shown_as(turned(pattern(160, 80), 2), "JPEG"),
    "tiny": shown(pattern(5, 3)),
    "narrow": shown(pattern(20, 600)),
    "too_large_to_keep": shown(pattern(1600, 1200), "JPEG"),
    "astronaut": shown(photograph("astronaut.png")),
    "coffee": shown(photograph("coffee.png")),
    "cat": shown(photograph("chelsea.png"), "JPEG"),
    "rocket": shown(photograph("rocket.jpg"), "JPEG"),
    "hubble": shown(photograph("hubble_deep_field.jpg"), "WEBP"),
}

BROKEN_PICTURE = {
    "type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}
}

_pictures = [
    Case(f"picture_{name}", CHAT, chat_body(user(part, "Describe it.")))
    for name, part in FORMS.items()
]

_several = [
    Case("two_pictures", CHAT, chat_body(user(FORMS["png"], FORMS["jpeg"], "Compare."))),
    Case(
        "text_and_pictures_in_turn", CHAT,
        chat_body(user("One: ", FORMS["gif"], " two: ", FORMS["webp"], " which?")),
    ),
    Case(
        "four_pictures", CHAT,
        chat_body(user(*(shown(pattern(84, 84, n)) for n in range(4)), "Which is odd?")),
    ),
    Case(
        "the_same_picture_twice", CHAT,
        chat_body(user(FORMS["bmp"], "or", FORMS["bmp"], "?")),
    ),
    Case(
        "pictures_over_several_turns", CHAT,
        chat_body(
            user(FORMS["coffee"], "What is it?"),
            says("assistant", "A cup."),
            user("And this?", FORMS["cat"]),
        ),
    ),
    Case(
        "picture_with_uuid", CHAT,
        chat_body(user({**FORMS["png"], "uuid": "a-picture-of-mine"}, "What?")),
    ),
    Case(
        "smaller_by_processor_options", CHAT,
        chat_body(
            user(FORMS["astronaut"], "What?"),
            mm_processor_kwargs={"min_pixels": 3136, "max_pixels": 50176},
        ),
    ),
    Case(
        "frames_of_a_video", CHAT,
        chat_body(
            user(
                {
                    "type": "video_url",
                    "video_url": {
                        "url": "data:video/jpeg;base64,"
                        + ",".join(
                            data_url(encoded(pattern(112, 84, n), "JPEG"), "JPEG")
                            .partition(",")[2]
                            for n in range(4)
                        )
                    },
                },
                "What happens?",
            )
        ),
    ),
]

_decoding = [
    Case("streamed", CHAT, chat_body(QUESTION, **STREAMED)),
    Case("streamed_text", CHAT, chat_body(user("Count."), **STREAMED, max_tokens=40)),
    Case("two_answers", CHAT, chat_body(QUESTION, n=2, **SAMPLED)),
    Case("three_answers", CHAT, chat_body(user("Sing."), n=3, **SAMPLED)),
    Case("three_answers_streamed", CHAT, chat_body(QUESTION, n=3, **SAMPLED, **STREAMED)),
    Case("sampled_with_top_k", CHAT, chat_body(QUESTION, **SAMPLED, top_k=9, min_p=0.01)),
    Case("five_top_logprobs", CHAT, chat_body(QUESTION, top_logprobs=5)),
    Case("prompt_logprobs", CHAT, chat_body(user("Hello there"), prompt_logprobs=1)),
    Case("system_prompt", CHAT, chat_body(says("system", "Be brief."), QUESTION)),
    Case("text_only", CHAT, chat_body(user("Who are you?"), max_tokens=60)),
    Case("long_text", CHAT, chat_body(user("All work and no play. " * 180), max_tokens=30)),
    Case(
        "long_text_before_and_after_a_picture", CHAT,
        chat_body(user("Look. " * 150, FORMS["coffee"], " Now think. " * 150)),
    ),
    Case("stop_string", CHAT, chat_body(QUESTION, stop=["e", "a", " "], max_tokens=60)),
    Case(
        "stop_string_kept", CHAT,
        chat_body(
            QUESTION, stop=["e", "a"], max_tokens=60, include_stop_str_in_output=True
        ),
    ),
    Case("stop_tokens", CHAT, chat_body(QUESTION, stop_token_ids=list(range(64, 80)))),
    Case(
        "min_tokens", CHAT,
        chat_body(QUESTION, min_tokens=20, max_tokens=30, stop=["e", "a"]),
    ),
    Case("logit_bias", CHAT, chat_body(QUESTION, logit_bias={"40": 30.0, "41": 30.0})),
    Case(
        "penalties", CHAT,
        chat_body(
            QUESTION, presence_penalty=0.9, frequency_penalty=0.7, repetition_penalty=1.3,
            max_tokens=40,
        ),
    ),
    Case("allowed_tokens", CHAT, chat_body(QUESTION, allowed_token_ids=[65, 66, 67])),
    Case("bad_words", CHAT, chat_body(QUESTION, bad_words=["a", "b", "c"], max_tokens=30)),
    Case("ignored_end", CHAT, chat_body(QUESTION, ignore_eos=True, max_tokens=50)),
    Case("one_token", CHAT, chat_body(QUESTION, max_tokens=1)),
    Case(
        "answer_begun_by_the_client", CHAT,
        chat_body(
            QUESTION, says("assistant", "It shows"), add_generation_prompt=False,
            continue_final_message=True,
        ),
    ),
]

_guided = [
    Case("tools_if_it_likes", CHAT, chat_body(QUESTION, tools=[WEATHER], tool_choice="auto")),
    Case(
        "tool_forced", CHAT,
        chat_body(QUESTION, tools=[WEATHER], tool_choice=NAMED_WEATHER, max_tokens=80),
    ),
    Case(
        "tool_forced_streamed", CHAT,
        chat_body(
            QUESTION, tools=[WEATHER], tool_choice=NAMED_WEATHER, max_tokens=80, **STREAMED
        ),
    ),
    Case(
        "tool_required", CHAT,
        chat_body(QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=120),
    ),
    Case(
        "tool_answered", CHAT,
        chat_body(
            QUESTION,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call-1", "type": "function",
                        "function": {
                            "name": "weather", "arguments": '{"city": "Oslo", "days": 1}'
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
            tools=[WEATHER],
        ),
    ),
    Case(
        "json_schema", CHAT, chat_body(QUESTION, response_format=ANIMAL_FORMAT, max_tokens=80)
    ),
    Case(
        "json_schema_streamed", CHAT,
        chat_body(QUESTION, response_format=ANIMAL_FORMAT, max_tokens=80, **STREAMED),
    ),
    Case(
        "regex", CHAT,
        chat_body(QUESTION, structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"}, max_tokens=30),
    ),
    Case("choice", CHAT, chat_body(QUESTION, structured_outputs={"choice": ["yes", "no"]})),
    Case(
        "grammar", CHAT,
        chat_body(
            QUESTION, structured_outputs={"grammar": 'root ::= "a" [0-9] [0-9] "z"'}
        ),
    ),
]

_completions = [
    Case("completion", COMPLETIONS, completion_body("Once upon a time")),
    Case("several_prompts", COMPLETIONS, completion_body(["One", "Two", "Three and four"])),
    Case("prompt_echoed", COMPLETIONS, completion_body("Once upon", echo=True)),
    Case("tokens_as_prompt", COMPLETIONS, completion_body([[40, 50, 60, 70], [80, 90]])),
    Case("completion_streamed", COMPLETIONS, completion_body("Once", **STREAMED)),
    Case(
        "several_prompts_streamed", COMPLETIONS,
        completion_body(["One", "Two", "Three and four"], **STREAMED),
    ),
    Case("several_answers", COMPLETIONS, completion_body(["One", "Two"], n=2, **SAMPLED)),
    Case(
        "beam_search", COMPLETIONS,
        completion_body("Once", n=2, use_beam_search=True, max_tokens=5, logprobs=None),
    ),
]

_IN_RESPONSES = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is it?"},
            {
                "type": "input_image", "detail": "auto",
                "image_url": FORMS["cat"]["image_url"]["url"],
            },
        ],
    }
]
_IN_MESSAGES = {
    "role": "user",
    "content": [
        {"type": "text", "text": "What is it?"},
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": FORMS["coffee"]["image_url"]["url"].partition(",")[2],
            },
        },
    ],
}

_other_apis = [
    Case("response", RESPONSES, responses_body("Who are you?")),
    Case("response_to_a_picture", RESPONSES, responses_body(_IN_RESPONSES)),
    Case("response_streamed", RESPONSES, responses_body(_IN_RESPONSES, stream=True)),
    Case(
        "response_by_schema", RESPONSES,
        responses_body(
            _IN_RESPONSES, max_output_tokens=80,
            text={"format": {"type": "json_schema", "name": "animal", "schema": ANIMAL}},
        ),
    ),
    Case("message", MESSAGES, messages_body(says("user", "Who are you?"), system="Be brief.")),
    Case("message_with_a_picture", MESSAGES, messages_body(_IN_MESSAGES)),
    Case("message_streamed", MESSAGES, messages_body(_IN_MESSAGES, stream=True)),
]

CASES: Sequence[Case] = [
    *_pictures, *_several, *_decoding, *_guided, *_completions, *_other_apis
]
