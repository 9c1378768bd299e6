"""What is compiled. Without a compiler it is left out: torch's own generator draws the noise, and torch takes the norms."""

from setuptools import Extension, setup

# No fused multiplications: every processor rounds alike, so that a replay is exact.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

setup(
    ext_modules=[
        Extension(f"zetaclip.{name}", [f"src/zetaclip/{name}.c"], extra_compile_args=FLAGS, optional=True)
        for name in ("_gaussian", "_rows")
    ]
)
