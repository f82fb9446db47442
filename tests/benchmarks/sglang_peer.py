"""Our checks beside SGLang's own canary (`--kv-canary`), kernel by kernel, in one run, inside CUDA graphs.

    PYTHONPATH=DIRECTORY python tests/benchmarks/sglang_peer.py [--write]
    PYTHONPATH=DIRECTORY python tests/benchmarks/sglang_peer.py --tiny        # no GPU: do both find what they must?

DIRECTORY has sglang and apache-tvm-ffi (`sglang_kernels.py` says what of them); nvcc compiles SGLang's kernels, half a
minute.  `sglang_comparison.py` says what both do.
"""

from __future__ import annotations

import argparse
import sys

from sglang_package import PeerMissingError, find_sglang


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small pools, nothing timed; runs without a GPU")
    parser.add_argument("--write", action="store_true", help="update the section in BENCHMARKS.md")
    args = parser.parse_args()
    if args.tiny and args.write:
        parser.error("--tiny is no measurement: nothing to --write")
    return args


def main() -> int:
    args = parse()
    try:
        find_sglang()
        import sglang_comparison  # and with it torch, for seconds

        return sglang_comparison.compare(args.tiny, args.write)
    except PeerMissingError as e:
        print(f"sglang_peer: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
