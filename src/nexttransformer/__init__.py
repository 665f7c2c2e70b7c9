"""NextTransformer: a fixed-protocol benchmark and trainer for next-generation Transformers.

Importing the package does not import torch, so that configuration errors appear at once.
"""

__version__ = "0.1.0"
