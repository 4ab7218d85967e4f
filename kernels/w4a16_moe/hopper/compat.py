"""Everything that differs between Gluon of Triton 3.6, 3.7 and 3.8. No other file looks at the version."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# All threads of the CTA (of the partition, inside warp_specialize) meet here. 3.6 names it thread_barrier.
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
