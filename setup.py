"""What is compiled. Without a compiler numpy draws the same noise, slowly, and torch takes the
norms.
"""

from setuptools import Extension, setup

# No fused multiplications: every processor rounds alike, so that a replay is exact.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

SOURCES = {
    "zetaclip.randomness._chacha": "src/zetaclip/randomness/_chacha.c",
    "zetaclip.gradients._rows": "src/zetaclip/gradients/_rows.c",
    "zetaclip.gradients._products": "src/zetaclip/gradients/_products.c",
}

# Products may be fused: they are made and used on one machine, by one code.
FUSED = {"zetaclip.gradients._products": ["-ffp-contract=fast"]}

HEADERS = [
    "src/zetaclip/_team.h",
    "src/zetaclip/gradients/_tiles.h",
    "src/zetaclip/gradients/_buffers.h",
]

setup(
    ext_modules=[
        Extension(
            name,
            [source],
            extra_compile_args=FLAGS + FUSED.get(name, []),
            depends=HEADERS,
            optional=True,
        )
        for name, source in SOURCES.items()
    ]
)
