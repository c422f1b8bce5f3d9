"""The LLM-optimizer benchmark of EPFL (Semenov, Pagliardini, Jaggi 2025) with our plans as more entries.

Their code is not part of the project: unpack github.com/epfml/llm-optimizer-benchmark and give its folder.
"""
