"""Go-MUON ("Second-Order Muon Done Right") as a PyTorch optimizer."""

__version__ = "0.1.0"
