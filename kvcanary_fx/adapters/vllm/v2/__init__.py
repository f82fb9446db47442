"""Model Runner V2 of vLLM, its default on GPUs: full and piecewise CUDA graphs, asynchronous scheduling.

It keeps requests, tables, positions and lengths on the device, and runs ahead of it.  So nothing here reads a value
back within a step, and the checks are either in vLLM's graphs (one launch a layer) or outside of them (a fixed number).
"""
