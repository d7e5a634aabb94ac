"""All statements, in the paper's order."""

from __future__ import annotations

from gomuon.lab.verification.average_statements import AVERAGE
from gomuon.lab.verification.drift_statements import DRIFTS
from gomuon.lab.verification.factor_statements import FACTORS
from gomuon.lab.verification.graft_statements import GRAFT
from gomuon.lab.verification.label_statements import LABELS
from gomuon.lab.verification.oracle_statements import ORACLE
from gomuon.lab.verification.package_statements import PACKAGE

STATEMENTS = (*ORACLE, *LABELS, *GRAFT, *FACTORS, *AVERAGE, *DRIFTS, *PACKAGE)
