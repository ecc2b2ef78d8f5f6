"""The embedded prefill/decode engine: real KV between real processes, on a laptop.

A stranger to the `tandem` package: the two meet over HTTP and a command line, like any engine.
"""
