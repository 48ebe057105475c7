"""An emulator of compiled kernels, Triton's.

It runs their PTX on a CPU, compares the results with float64, and checks every access:

- bounds, alignment, memory that nothing wrote;
- races: bytes that two threads touch, one of them writing, without a barrier between;
- copies in the background (cp.async, bulk copies) and products of four warps (wgmma) without a wait,
  whose operands change, or that lack a proxy fence;
- barriers, shuffles and mbarriers that not all threads reach;
- launches that overlap the kernel before (``launch_pdl``) and touch global memory, or end, before they have
  waited for it.

Copies and products take place at their wait, as late as they may. It counts what is executed, sectors of
global and bank conflicts in shared memory. What ptxas makes of the PTX is not seen; sm_100 is not
supported.
"""
