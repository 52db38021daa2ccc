"""The error tree of this boundary: bytes, references and links.

TransferError
├── ArenaFull        nothing can be evicted to make room
├── StaleRef         the reference's bytes have been replaced since
├── ArenaGone        the shared memory cannot be seen from here
├── PeerLost         the other side has gone
├── NixlUnavailable  NIXL does not work in this process
├── ReadFailed       a READ from another process came to nothing
├── BadMessage       bytes that are not a message of ours
├── BadKeys          the keys of --secure-keys cannot be used
├── BadSeed          the secret seed of identities cannot be used
└── EtcdUnavailable  etcd does not answer, or refuses
"""


class TransferError(Exception):
    """Base of everything that can go wrong between processes."""


class ArenaFull(TransferError):
    """Every entry is in use, or the tensors are larger than the arena."""


class StaleRef(TransferError):
    """The entry now holds something else, or never held this."""


class ArenaGone(TransferError):
    """The segment does not exist here, or is not the one that was named."""


class PeerLost(TransferError):
    """The other side stopped answering."""


class NixlUnavailable(TransferError):
    """NIXL is not installed, or has no transport that works here."""


class ReadFailed(TransferError):
    """NIXL could not read from the other side, or did not in time."""


class BadMessage(TransferError):
    """A frame that does not decode, or refers to what it must not."""


class BadKeys(TransferError):
    """Keys that are missing, are none, or can be read by others."""


class BadSeed(TransferError):
    """The file of the seed is open to others, or does not hold one."""


class EtcdUnavailable(TransferError):
    """No endpoint of the etcd cluster answers, or it refuses a call."""
