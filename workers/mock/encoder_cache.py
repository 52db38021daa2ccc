"""The encoder cache of a mock engine: outputs of the vision encoder, by image identity.

Behaves like vLLM's: an output that no request needs stays until its space is needed, and
then the one goes first that has been needed by nobody for longest.
"""

from __future__ import annotations

from collections import OrderedDict


class EncoderCache:
    """Holds encoder outputs of at most ``capacity`` embedding tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._sizes: dict[str, int] = {}
        self._users: dict[str, set[str]] = {}
        self._unused: OrderedDict[str, int] = OrderedDict()
        self._taken = 0
        self._unneeded = 0

    def __contains__(self, identity: str) -> bool:
        return identity in self._sizes

    def has_room(self, tokens: int) -> bool:
        """Whether an output of ``tokens`` fits once unused ones have gone."""
        return self.capacity - self._taken + self._unneeded >= tokens

    def use(self, identity: str, tokens: int, request_id: str) -> None:
        """Keep an output for a request, and make room for it if it is not there yet.

        Raises:
            ValueError: there is no room.
        """
        if identity not in self._sizes:
            if not self.has_room(tokens):
                raise ValueError(f"no room for the {tokens} tokens of {identity}")
            while self.capacity - self._taken < tokens:
                oldest, freed = self._unused.popitem(last=False)
                self._forget(oldest, freed)
            self._sizes[identity] = tokens
            self._taken += tokens
        self._unneeded -= self._unused.pop(identity, 0)
        self._users.setdefault(identity, set()).add(request_id)

    def release(self, identity: str, request_id: str) -> None:
        """Note that a request needs the output no more; doing so twice is no error."""
        users = self._users.get(identity)
        if users is None or request_id not in users:
            return
        users.remove(request_id)
        if not users:
            del self._users[identity]
            self._unused[identity] = self._sizes[identity]
            self._unneeded += self._sizes[identity]

    def reset(self) -> None:
        """Forget all outputs that no request needs."""
        while self._unused:
            self._forget(*self._unused.popitem())

    def _forget(self, identity: str, tokens: int) -> None:
        del self._sizes[identity]
        self._taken -= tokens
        self._unneeded -= tokens
