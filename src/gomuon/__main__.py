"""The command ``gomuon``, also as ``python -m gomuon``."""

from __future__ import annotations

import sys

LAB = ("matplotlib", "numpy", "pooch", "rich", "tyro")


def main() -> int:
    """Hand over to the lab, or say how to get it."""
    try:
        from gomuon.lab import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in LAB:
            raise
        print(
            f'gomuon: the command line needs {error.name.split(".")[0]}; pip install "gomuon[lab]"',
            file=sys.stderr,
        )
        return 2
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
