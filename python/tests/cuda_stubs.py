"""Builds empty CUDA libraries for a torch that was built for CUDA, so that it can be imported without them.

Every function in them returns 100, CUDA's code for "no device". Usage: ``cuda_stubs.py TORCH_DIR OUT_DIR``.
Needs ``cc`` and ``readelf``, which comes with it.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100
#: Libraries that every machine with a C compiler has.
SYSTEM = re.compile(r"^(ld-linux|lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+|gomp|python[\d.]*)\.)")
#: Symbols without a version are CUDA's own when they are named so.
UNVERSIONED = re.compile(r"^_{0,2}(cu|nv|nccl)[A-Za-z]")


def readelf(*arguments: str) -> str:
    return subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=True).stdout


class Library:
    """The symbols that one shared object defines and requires."""

    def __init__(self, path: Path):
        self.needs = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", str(path)))
        #: Version name -> the library that must define it.
        self.versions: dict[str, str] = {}
        wanted = readelf("-V", str(path)).partition("Version needs section")[2]
        file = ""
        for line in wanted.splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            elif found := re.search(r"Name: (\S+)", line):
                self.versions[found[1]] = file
        self.defined: set[str] = set()
        #: (symbol, version or "")
        self.wanted: set[tuple[str, str]] = set()
        for line in readelf("--dyn-syms", str(path)).splitlines():
            fields = line.split()
            if len(fields) < 8 or not fields[0].endswith(":") or fields[3] not in ("FUNC", "OBJECT", "NOTYPE", "TLS"):
                continue
            name, _, version = fields[7].partition("@")
            if fields[6] == "UND":
                self.wanted.add((name, version.lstrip("@")))
            else:
                self.defined.add(name)


def main(torch: Path, out: Path) -> None:
    paths = sorted([*torch.glob("lib/*.so*"), *torch.glob("*.so")])
    libraries = [Library(path) for path in paths]
    present = {path.name for path in paths}
    missing = sorted({name for library in libraries for name in library.needs if name not in present})
    missing = [name for name in missing if not SYSTEM.match(name)]
    defined = set().union(*(library.defined for library in libraries))
    # library -> version -> symbols
    symbols: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    loose: set[str] = set()
    for library in libraries:
        for version, name in library.versions.items():
            if name in symbols:
                symbols[name][version] = symbols[name][version]
        for symbol, version in library.wanted:
            owner = library.versions.get(version)
            if owner in symbols:
                symbols[owner][version].add(symbol)
            elif not version and symbol not in defined and UNVERSIONED.match(symbol):
                loose.add(symbol)
    # Symbols without a version are found in any library.
    symbols[missing[0]][""] |= loose
    out.mkdir(parents=True, exist_ok=True)
    for name, versions in symbols.items():
        build(out, name, versions)
    print(f"{len(missing)} stubs in {out}")


def build(out: Path, name: str, versions: dict[str, set[str]]) -> None:
    source, script = out / f"{name}.c", out / f"{name}.map"
    functions = sorted(set().union(*versions.values()))
    source.write_text("".join(f"int {symbol}(void) {{ return {NO_DEVICE}; }}\n" for symbol in functions))
    command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(out / name), str(source)]
    command.append(f"-Wl,-soname,{name}")
    named = {version: symbols for version, symbols in versions.items() if version}
    if named:
        lines = [
            f"{version} {{ global: {' '.join(f'{symbol};' for symbol in sorted(symbols))} }};\n"
            if symbols
            else f"{version} {{ }};\n"
            for version, symbols in sorted(named.items())
        ]
        script.write_text("".join(lines))
        command.append(f"-Wl,--version-script,{script}")
    subprocess.run(command, check=True)
    source.unlink()
    script.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
