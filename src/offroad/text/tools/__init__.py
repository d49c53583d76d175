"""Calls of tools in what models say: one parser a notation."""
