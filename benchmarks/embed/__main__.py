"""``python -m benchmarks.embed``: what sharing encoder outputs among workers spares.

Large images are asked about again after their KV blocks and the engine's own encoder
cache have gone: of a worker that shares its host's encoder outputs, and in turns of one
that does not. Two workers that share are asked about every image, and their encoder runs
are counted. Last, images that nobody has seen are asked about with an encode worker in
the fleet and without.
"""

import sys

from benchmarks.runner import Section, parser_of, prepare_for_vllm, run


def main() -> int:
    parser_of("embed", __doc__).parse_args()
    prepare_for_vllm(quiet=False)

    from benchmarks.embed.fleets import PROMISED, measure

    return run([Section("embed", PROMISED, measure)])


if __name__ == "__main__":
    sys.exit(main())
