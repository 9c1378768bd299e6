"""The one part that is compiled. Without a compiler it is left out, and torch's own generator draws the noise."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "zetaclip._gaussian",
            ["src/zetaclip/_gaussian.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ]
)
