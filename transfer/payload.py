"""What follows some messages, in vLLM's own encoding: requests, outputs, arguments, results.

vLLM's structs are positional, so both sides must run the same vLLM version; ``WorkerFacts``
states it.

Nothing here is ever unpickled: vLLM's decoder accepts pickle extension codes when
VLLM_ALLOW_INSECURE_SERIALIZATION is set, ours refuses them whatever it says.

vLLM names relied on: v1.engine.EngineCoreRequest, EngineCoreOutputs;
v1.serial_utils.MsgpackEncoder, MsgpackDecoder, CUSTOM_TYPE_RAW_VIEW, UtilityResult.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import (
    CUSTOM_TYPE_RAW_VIEW,
    MsgpackDecoder,
    MsgpackEncoder,
    UtilityResult,
)

from transfer.encoded_item import EncodedItem
from transfer.errors import BadMessage
from transfer.messages import Frame
from transfer.pack import is_packed


class _StrictDecoder(MsgpackDecoder):
    """vLLM's decoder without pickle and without types named by the sender."""

    def ext_hook(self, code: int, data: memoryview) -> Any:
        if code == CUSTOM_TYPE_RAW_VIEW:
            return data
        raise BadMessage(f"extension code {code} is not allowed")

    def _decode_utility_result(self, obj: Any) -> UtilityResult:
        raise BadMessage("utility results are not allowed here")


class _PayloadEncoder(MsgpackEncoder):
    """vLLM's encoder, which does not encode an item in shared memory twice."""

    def enc_hook(self, obj: Any) -> Any:
        if isinstance(obj, EncodedItem) and is_packed(obj):
            raw = obj.encoding.of(obj.data)
            if raw is None:
                obj.encoding.keep(obj.data, _item_encoder.encode(obj))
                raw = obj.encoding.of(obj.data)
            if raw is not None:
                return raw
        return super().enc_hook(obj)


_item_encoder = MsgpackEncoder()
_vllm_encoder = _PayloadEncoder()
_request_decoder = _StrictDecoder(EngineCoreRequest)
_outputs_decoder = _StrictDecoder(EngineCoreOutputs)

T = TypeVar("T")


def encode_payload(value: Any) -> Sequence[Frame]:
    """Encode a request, outputs or call arguments as vLLM does; tensors are not copied.

    Not safe to call from several threads at once.
    """
    return cast("Sequence[Frame]", _vllm_encoder.encode(value))


def decode_request(frames: Sequence[Frame]) -> EngineCoreRequest:
    """Decode the payload of ``AddRequest``; tensors are views over the frames."""
    return _decode_payload(_request_decoder, frames)


def decode_outputs(frames: Sequence[Frame]) -> EngineCoreOutputs:
    """Decode the payload of ``Outputs``; arrays are views over the frames."""
    return _decode_payload(_outputs_decoder, frames)


def decode_payload_as(type_: type[T], frames: Sequence[Frame]) -> T:
    """Decode call arguments or results to ``type_`` (``object`` for anything plain)."""
    args = () if type_ is object else (type_,)
    return _decode_payload(_StrictDecoder(*args), frames)


def _decode_payload(decoder: MsgpackDecoder, frames: Sequence[Frame]) -> Any:
    try:
        return decoder.decode(frames)
    except BadMessage:
        raise
    except Exception as error:  # whatever numpy and torch make of hostile bytes
        raise BadMessage(f"payload does not decode: {error}") from error
