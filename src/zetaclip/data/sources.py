"""Addresses and digests of the canonical files of each set.

MNIST, Adult and Heart: sha256 of files whose md5 is the one in public loaders. CIFAR: the md5 on
the author's page for the archive, and the sha1 that MXNet publishes for its members. EMNIST and
Fashion-MNIST: the md5 that their authors or torchvision publish. No digest of VED's weekly files is
published, and ImageNet is available to registered users only: these two are fetched by hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One file to download.

    Attributes:
        url: Its address.
        path: Its path under the data root.
        digest: "md5:...", "sha1:..." or "sha256:...".
        members: For an archive, the files to extract: (name in the archive, path under the data
            root, digest or ""). The archive is then deleted.
    """

    url: str
    path: str
    digest: str
    members: tuple[tuple[str, str, str], ...] = ()


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_CIFAR = "https://www.cs.toronto.edu/~kriz"

SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": tuple(
        Source(f"{_MNIST}/{name}", f"mnist/{name}", f"sha256:{digest}")
        for name, digest in (
            (
                "train-images-idx3-ubyte.gz",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            (
                "train-labels-idx1-ubyte.gz",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            (
                "t10k-images-idx3-ubyte.gz",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            (
                "t10k-labels-idx1-ubyte.gz",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        )
    ),
    "fashion-mnist": tuple(
        Source(f"{_FASHION}/{name}", f"fashion-mnist/{name}", f"md5:{digest}")
        for name, digest in (
            ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        )
    ),
    "emnist": (
        Source(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "emnist/gzip.zip",
            "md5:58c8d27c78d21e728a6bc7b3cc06412e",
            tuple(
                (f"gzip/emnist-letters-{part}.gz", f"emnist/emnist-letters-{part}.gz", digest)
                for part, digest in (
                    (
                        "train-images-idx3-ubyte",
                        "sha256:6288f418a917e007bf5fddb823a2dc7a5c6a35031401b93292a539cb12bd881f",
                    ),
                    ("train-labels-idx1-ubyte", ""),
                    (
                        "test-images-idx3-ubyte",
                        "sha256:50f0e93d75b99b463e9760b8345866f22587fa2c2fba472730a5ba09c693412d",
                    ),
                    ("test-labels-idx1-ubyte", ""),
                )
            ),
        ),
    ),
    "cifar10": (
        Source(
            f"{_CIFAR}/cifar-10-binary.tar.gz",
            "cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            tuple(
                (f"cifar-10-batches-bin/{name}", f"cifar-10-batches-bin/{name}", f"sha1:{digest}")
                for name, digest in (
                    ("data_batch_1.bin", "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
                    ("data_batch_2.bin", "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
                    ("data_batch_3.bin", "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
                    ("data_batch_4.bin", "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
                    ("data_batch_5.bin", "26e2849e66a845b7f1e4614ae70f4889ae604628"),
                    ("test_batch.bin", "67eb016db431130d61cd03c7ad570b013799c88c"),
                )
            ),
        ),
    ),
    "cifar100": (
        Source(
            f"{_CIFAR}/cifar-100-binary.tar.gz",
            "cifar-100-binary.tar.gz",
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            (
                (
                    "cifar-100-binary/train.bin",
                    "cifar-100-binary/train.bin",
                    "sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e",
                ),
                (
                    "cifar-100-binary/test.bin",
                    "cifar-100-binary/test.bin",
                    "sha1:8fb6623e830365ff53cf14adec797474f5478006",
                ),
            ),
        ),
    ),
    "adult": tuple(
        Source(f"{_UCI}/adult/{name}", f"adult/{name}", f"sha256:{digest}")
        for name, digest in (
            ("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
            ("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
        )
    ),
    "heart": tuple(
        Source(
            f"{_UCI}/heart-disease/processed.{name}.data",
            f"heart-disease/processed.{name}.data",
            f"sha256:{digest}",
        )
        for name, digest in (
            ("cleveland", "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
            ("hungarian", "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
            ("switzerland", "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
            ("va", "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
        )
    ),
}

# Sets that cannot be downloaded and checked by a program, and what to do instead.
BY_HAND: dict[str, str] = {
    "digits": "digits comes with scikit-learn: there is nothing to fetch",
    "imagenet100": (
        "ImageNet is available to registered users only: put the hundred classes into "
        "imagenet100/train/CLASS and imagenet100/val/CLASS under the data root"
    ),
    "imagenet-sample": (
        "a small sample for tests of the loader; any folder with train/CLASS and val/CLASS will do"
    ),
    "ved": (
        "no digest of VED's archives is published: unpack VED_DynamicData_Part1.7z and Part2.7z of "
        "github.com/gsoh/VED into ved/ under the data root, and put VED_Static_Data_ICE&HEV.xlsx "
        "beside the weeks"
    ),
}
