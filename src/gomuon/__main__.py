"""The command ``gomuon``, also ``python -m gomuon``."""

from __future__ import annotations

import sys

LAB = ("matplotlib", "numpy", "pooch", "rich", "tyro")


def main() -> int:
    """Run the lab's command line, or say how to install it."""
    try:
        from gomuon.lab import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in LAB:
            raise
        print(
            f"gomuon: the command line needs {error.name.split('.')[0]}; install it with: "
            'pip install "gomuon[lab]"',
            file=sys.stderr,
        )
        return 2
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
