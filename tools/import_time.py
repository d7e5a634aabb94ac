"""Print how long `import gomuon` takes beside `import torch`, in new processes, one after another.

    python -m tools.import_time [ROUNDS]

Both are measured in every round: first `import torch`, then `import gomuon` in the same process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

PROGRAM = """
import time
begin = time.perf_counter()
import torch
middle = time.perf_counter()
import gomuon
end = time.perf_counter()
print(middle - begin, end - middle)
"""


def main(rounds: int = 7) -> None:
    """Print the medians and their ratio."""
    pairs = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
        )
        torch_seconds, ours = map(float, done.stdout.split())
        pairs.append((torch_seconds, ours))
    torch_median, our_median = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(ours / torch_seconds for torch_seconds, ours in pairs)
    print(f"import torch   {torch_median:.2f} s")
    print(f"import gomuon  {our_median:.2f} s more, {ratio:.2f} of torch's (median of {rounds})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
