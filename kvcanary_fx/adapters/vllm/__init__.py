"""vLLM, protected by an environment variable: ``KVCANARY_MODE=raise vllm serve ...``.

vLLM loads :func:`~.plugin.register` in each of its processes, through the entry point ``vllm.general_plugins``.  See
docs/vllm.md for what is guarded, and how.  Nothing here is imported unless vLLM asks for it.
"""
