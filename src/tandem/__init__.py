"""Tandem keeps prefill/decode-disaggregated LLM inference honest."""

__version__ = "0.1.0"
