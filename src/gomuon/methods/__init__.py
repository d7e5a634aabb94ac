"""The methods, one file each. A new one needs its file and a line here.

The order is that of the paper's table, and of every table made from the registry.
"""

# ruff: noqa: I001 (the order is the tables')
from gomuon.methods.muon import Muon as Muon
from gomuon.methods.kfac import KFAC as KFAC
from gomuon.methods.shampoo import Shampoo as Shampoo
from gomuon.methods.soap import SOAP as SOAP
from gomuon.methods.mousse import Mousse as Mousse
from gomuon.methods.fismo import FISMO as FISMO
from gomuon.methods.go_muon import GoMuon as GoMuon
from gomuon.methods.newton_muon import NewtonMuon as NewtonMuon
from gomuon.methods.muon_squared import MuonSquared as MuonSquared
from gomuon.methods.malt import MALT as MALT
from gomuon.methods.muon_plus import MuonPlus as MuonPlus
from gomuon.methods.muon_eq import MuonEq as MuonEq
from gomuon.methods.scion import Scion as Scion
from gomuon.methods.kfac_muon import KFACMuon as KFACMuon
from gomuon.methods.muon_qk import MuonQK as MuonQK
from gomuon.methods.halfspace import Halfspace as Halfspace
from gomuon.methods.registry import METHODS

__all__ = sorted(METHODS)
