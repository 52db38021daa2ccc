"""Why a request is answered with an error for the sake of an image.

vLLM names relied on: exceptions.GracefulHTTPError, VLLMValidationError.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError, VLLMValidationError


@dataclass(frozen=True)
class Refused:
    """One such reason."""

    reason: str
    """In a word or two, as metrics have it."""
    text: str
    """As the client has it."""
    status: HTTPStatus

    def error(self) -> Exception:
        """What vLLM's app makes such an answer of."""
        if self.status == HTTPStatus.BAD_REQUEST:
            return VLLMValidationError(self.text)
        return GracefulHTTPError(self.text, self.status)


LOST = Refused(
    "lost",
    "The processes that process images were lost. Please try again later.",
    HTTPStatus.SERVICE_UNAVAILABLE,
)


def too_many(waiting: int) -> Refused:
    return Refused(
        "queue full",
        f"{waiting} images are waiting to be processed. Please try again later.",
        HTTPStatus.SERVICE_UNAVAILABLE,
    )


def overdue(seconds: float) -> Refused:
    return Refused(
        "overdue",
        f"An image was not processed within {seconds:.0f} seconds. Please try again later.",
        HTTPStatus.SERVICE_UNAVAILABLE,
    )


def unreadable(text: str) -> Refused:
    return Refused("unreadable", text, HTTPStatus.BAD_REQUEST)


def poisonous(attempts: int) -> Refused:
    return Refused(
        "crashed",
        f"{attempts} processes ended while they processed an image of this request.",
        HTTPStatus.BAD_REQUEST,
    )
