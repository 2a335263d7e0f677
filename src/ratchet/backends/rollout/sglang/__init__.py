"""A rollout engine in front of SGLang servers. Needs the extra `sglang`."""
