"""The tiers: one file per place chunks live, opened by name."""

from lmkv.tier import open_tier, register_tier

__all__ = ["open_tier", "register_tier"]
