"""For all tests: processes that test at the same time leave each other the cores."""

import os

# Before torch is imported. OpenMP's threads otherwise spin while they wait, which takes the cores
# from the other test process: the suite then takes several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
