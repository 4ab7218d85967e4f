"""Hopper device schedules in Gluon: `mma_sync` and `stream_k` for few tokens per expert, `wgmma` for many."""
