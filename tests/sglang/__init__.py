"""Tests with a real SGLang engine, in the environment that `python3 -m tools.env sglang` makes."""
