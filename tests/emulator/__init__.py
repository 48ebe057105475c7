"""An emulator of compiled Triton kernels, which runs their PTX on the CPU and checks every access."""
