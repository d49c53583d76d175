"""The bodies of requests: each field is honoured, or refused with an error that names it.

Fields of the OpenAI and vLLM APIs that do not change an answer are accepted with the values for which that is true.
"""
