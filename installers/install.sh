#!/bin/sh
# Installs the Echo Swarm node agent: for one user, or, run by root, for the machine.
#
# - Everything is in one folder, with a separate environment for each version; no system file is changed.
# - A version becomes active when `current` points to it. This is one atomic step, after the version has passed its own
#   check. If this script is interrupted, the previous version stays active; run the script again.
# - The packages of the agent and of vLLM come from the version's own lists, and each is checked against its hash. torch,
#   transformers and llama.cpp are pinned by version only, and so are their dependencies that a list names.
# - uv installs the packages, since pip takes a minute longer; where uv fails, pip installs them by the same lists. pip's
#   configuration of this machine holds for both, and no file of the current folder.
# - Only llama.cpp is compiled, for this processor.
# - In a checkout of the repository, the script builds the agent's wheel from the checkout.
# - A dry run obtains the wheel as the installation does, in a temporary folder, so that it fails where the installation fails.
# - The script checks the requirements before it changes anything.
# - Keys and receipts are in the node's home, which only --purge removes.
# - Code of a running agent is never removed: the service stops cleanly and restarts with the new version, an agent that
#   was started by hand is reported with the next step, and a running version is kept.
set -eu

# Never import modules from the current folder: as root it may be /tmp, where others can write.
export PYTHONSAFEPATH=1

PROGRAM=install.sh
if [ "$(id -u)" = 0 ]; then
  PREFIX=/usr/local/lib/echo-swarm BIN=/usr/local/bin NODE_HOME=/var/lib/echo-swarm
else
  PREFIX=$HOME/.local/lib/echo-swarm BIN=$HOME/.local/bin NODE_HOME=$HOME/.local/share/echo-swarm
fi
PACKAGE=echo-swarm
VERSION=
ENGINE=auto
PYTHON=
FIND_LINKS=
SHA256=
JOIN=
DRY_RUN=
ACTION=install
# A coordinator that serves this script sets these three lines: its join string, and the wheel that it serves, if any.
ROUND_JOIN=
ROUND_WHEEL=
ROUND_WHEEL_SHA256=
PURGE=
# The kernel's folders; a test names others.
SYS=${ECHO_SWARM_SYS:-/sys}
DEV=${ECHO_SWARM_DEV:-/dev}

usage() {
  cat <<TEXT
usage: $PROGRAM [options]

Installs or updates swarm-node, the agent that samples on this machine for a training round. In a checkout of the
repository it builds the agent from there; elsewhere it downloads a release.

  --engine E         engine that samples: auto, torch, llama, vllm or none. auto selects vllm for an NVIDIA GPU of
                     16 GB or more, llama on a Mac with a compiler, otherwise torch: for CUDA, ROCm (AMD), XPU
                     (Intel), Metal (Mac), or the processor
  --version X        download version X, also in a checkout
  --find-links DIR   also use packages in this folder, for example a wheel of echo-swarm, also in a checkout
  --sha256 HEX       reject a wheel of echo-swarm with another hash
  --python PATH      Python to use; default: the first suitable one of python3.13 … python3.11, python3
  --prefix DIR       installation folder ($PREFIX)
  --bin DIR          folder for the command ($BIN)
  --service JOIN     also start the agent at boot (without root: when you log in), for the round at JOIN
  --dry-run          check everything, obtain the agent's package, print what would be done, and change nothing
  --uninstall        remove everything that this script has installed, except the node's keys
  --purge            with --uninstall: also remove the node's home with its keys
  --help             print this text

To update, run it again. pip's own configuration (index, proxy, certificates) is used.
TEXT
}

say() { printf '%s\n' "$@"; }

die() {
  printf '%s: %s\n' "$PROGRAM" "$1" >&2
  shift
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}

parse() {
  while [ $# -gt 0 ]; do
    case $1 in
      --engine | --version | --find-links | --sha256 | --python | --prefix | --bin | --service)
        [ $# -ge 2 ] || { usage >&2; exit 2; }
        case $1 in
          --engine) ENGINE=$2 ;;
          --version) VERSION=$2 ;;
          --find-links) FIND_LINKS=$2 ;;
          --sha256) SHA256=$2 ;;
          --python) PYTHON=$2 ;;
          --prefix) PREFIX=$2 ;;
          --bin) BIN=$2 ;;
          --service) JOIN=$2 ;;
        esac
        shift ;;
      --dry-run) DRY_RUN=yes ;;
      --uninstall) ACTION=uninstall ;;
      --purge) PURGE=yes ;;
      --help | -h) usage; exit 0 ;;
      *) printf '%s: unknown option %s\n\n' "$PROGRAM" "$1" >&2; usage >&2; exit 2 ;;
    esac
    shift
  done
  case $ENGINE in
    auto | torch | llama | vllm | none) ;;
    *) printf '%s: --engine must be auto, torch, llama, vllm or none, not %s\n' "$PROGRAM" "$ENGINE" >&2; exit 2 ;;
  esac
  [ -z "$PURGE" ] || [ "$ACTION" = uninstall ] || { printf '%s: --purge needs --uninstall\n' "$PROGRAM" >&2; exit 2; }
  case $JOIN in
    *[!A-Za-z0-9:/.#_-]*) printf '%s: %s is not a valid join string\n' "$PROGRAM" "$JOIN" >&2; exit 2 ;;
  esac
  case $PREFIX in /*) ;; *) PREFIX=$PWD/$PREFIX ;; esac
  case $BIN in /*) ;; *) BIN=$PWD/$BIN ;; esac
}

# --- checks of this machine -------------------------------------------------------------------------------------------

find_system() {
  SYSTEM=$(uname -s)
  MACHINE=$(uname -m)
  case $SYSTEM in
    Linux | Darwin) ;;
    *) die "swarm-node runs on Linux and macOS, not on $SYSTEM." "On Windows use install.ps1, which installs into WSL 2." ;;
  esac
  case $MACHINE in
    x86_64 | amd64 | aarch64 | arm64) ;;
    *) die "Processor type $MACHINE is not supported." "Supported: x86-64 and 64-bit ARM." ;;
  esac
  if [ "$SYSTEM" = Darwin ] && [ "$MACHINE" = x86_64 ]; then
    die "Macs with Intel processors are not supported: there are no current torch builds for them."
  fi
  GLIBC=0
  [ "$SYSTEM" = Linux ] || return 0
  LIBC=$({ ldd --version 2>&1 || true; } | head -n 1)
  case $LIBC in
    *GNU* | *GLIBC* | *glibc*) ;;
    *) die "This Linux has no glibc, which torch and vLLM need." "Use a container with Debian: see the Dockerfile." ;;
  esac
  GLIBC=$(printf '%s' "${LIBC##* 2.}" | sed 's/[^0-9].*//')
  [ "${GLIBC:-0}" -ge 28 ] || die "The packages need glibc 2.28 or newer; this system has glibc 2.${GLIBC:-?}." \
    "Use a newer release of your system, or a container with Debian: see the Dockerfile."
}

# On Python 3.14, coincurve, which libp2p needs, would have to be compiled.
new_enough() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

find_python() {
  if [ -n "$PYTHON" ]; then
    new_enough "$PYTHON" || die "$PYTHON is not Python 3.11, 3.12 or 3.13." "Give another one with --python PATH."
  else
    for candidate in python3.13 python3.12 python3.11 python3; do
      if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then PYTHON=$(command -v "$candidate"); break; fi
    done
  fi
  [ -n "$PYTHON" ] || die "Python 3.11, 3.12 or 3.13 is needed, but was not found. Install one:" \
    "Debian, Ubuntu:  sudo apt-get install python3 python3-venv" \
    "Fedora:          sudo dnf install python3.13" \
    "macOS:           brew install python@3.12" \
    "Or give its path with --python PATH."
  UV=$(command -v uv 2>/dev/null || true)
  if [ -z "$UV" ] && ! "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    die "$PYTHON has no venv module, which Debian and Ubuntu package separately." "sudo apt-get install python3-venv" \
      "Or install uv, which this script uses if available."
  fi
}

# Set SOURCE to the checkout that contains this script. A script that is read from a pipe is in no checkout.
find_source() {
  SOURCE=
  [ -z "$FIND_LINKS$VERSION" ] || ROUND_WHEEL=
  [ -z "$FIND_LINKS$VERSION$ROUND_JOIN" ] && [ "${0##*/}" = install.sh ] && [ -f "$0" ] || return 0
  folder=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P) || return 0
  if [ -f "$folder/installers/build.lock" ] && grep -qx 'name = "echo-swarm"' "$folder/pyproject.toml" 2>/dev/null; then
    SOURCE=$folder
  fi
}

# torch and vLLM are built for CUDA 13, which needs this driver by NVIDIA's table. A driver that reports no version is
# not checked.
DRIVER_MIN=580

# Set CARD_VENDOR to amd or intel by the kernel's files, as `swarm-node doctor` does. Intel's processors have a graphics
# unit, too: only a card has sensors.
find_other_card() {
  CARD_VENDOR=
  for device in "$SYS"/class/drm/card[0-9]*/device; do
    case $(cat "$device/vendor" 2>/dev/null || true) in
      0x1002) CARD_VENDOR=amd; return ;;
      0x8086) for sensor in "$device"/hwmon/hwmon*; do [ ! -e "$sensor" ] || CARD_VENDOR=intel; done ;;
    esac
  done
  # Docker images and WSL may lack these files.
  [ -n "$CARD_VENDOR" ] || ! command -v rocm-smi >/dev/null 2>&1 || CARD_VENDOR=amd
}

# Set TORCH_BUILD to the build of torch that uses this card: uv's name of it, or nothing for that of the package index.
# ROCm and XPU are parts of these builds; only the kernel's driver has to be there. They exist for x86-64 Linux.
ROCM_BUILD=rocm7.2

# Builds for CUDA 13 have no code for cards before Turing (compute capability 7.5): GeForce 10, P100, V100 and older. The
# build for CUDA 12.6 has, down to Maxwell (5.0). No build has code for Kepler (3.x), such as K80: it gets the CPU's.
OLDER_BUILD=cu126

is_older_card() {
  case $MACHINE in x86_64 | amd64) ;; *) return 1 ;; esac
  case $(ask_card compute_cap) in [56].[0-9] | 7.[0-4]) return 0 ;; *) return 1 ;; esac
}

is_too_old_card() {
  case $(ask_card compute_cap) in [1-4].[0-9]) return 0 ;; *) return 1 ;; esac
}

find_torch_build() {
  TORCH_BUILD='' NO_BUILD=''
  [ "$SYSTEM" = Linux ] || return 0
  if [ -n "$CARD" ]; then
    if is_too_old_card; then
      NO_BUILD="no build of torch supports $CARD any more"
      case $MACHINE in x86_64 | amd64) TORCH_BUILD=cpu ;; esac
    elif is_older_card; then
      TORCH_BUILD=$OLDER_BUILD
    fi
    return 0
  fi
  find_other_card
  if [ "$MACHINE" != x86_64 ] && [ "$MACHINE" != amd64 ]; then
    [ -z "$CARD_VENDOR" ] || NO_BUILD="torch has no build for $CARD_VENDOR cards on $MACHINE"
    return 0
  fi
  TORCH_BUILD=cpu
  case $CARD_VENDOR in
    amd) if [ -e "$DEV/kfd" ]; then TORCH_BUILD=$ROCM_BUILD
      else NO_BUILD="an AMD card is there, but not /dev/kfd: install AMD's amdgpu driver with ROCm support"; fi ;;
    intel) TORCH_BUILD=xpu ;;
  esac
}

# Print what nvidia-smi says of the first card; nothing if it fails, since it prints errors to standard output, too.
ask_card() {
  said=$("$NVIDIA_SMI" --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null) || said=
  printf '%s\n' "$said" | head -n 1
}

# Set CARD if a driver is loaded and nvidia-smi fails: after an update, both differ until the machine restarts.
find_silent_card() {
  [ -e /proc/driver/nvidia/version ] || [ -e "$DEV/dxg" ] || return 0
  CARD='an NVIDIA card'
  say "nvidia-smi fails: $("$NVIDIA_SMI" 2>&1 | head -n 1 || true)" "Restart the machine, or reinstall the driver, before you join."
}

check_driver() {
  [ -z "$TORCH_BUILD" ] || return 0
  case $DRIVER in [0-9]*.*) ;; *) return 0 ;; esac
  [ "${DRIVER%%.*}" -lt "$DRIVER_MIN" ] || return 0
  case $ENGINE in
    auto | vllm) die "NVIDIA driver $DRIVER is too old: torch and vLLM need $DRIVER_MIN or newer (CUDA 13)." \
      "Ubuntu:  sudo ubuntu-drivers install, then restart the machine" \
      "Windows: update the NVIDIA driver in Windows, not inside WSL" \
      "Or use --engine torch, which samples on the CPU until the driver is updated." ;;
    torch) say "NVIDIA driver $DRIVER is too old: torch needs $DRIVER_MIN or newer. The CPU will be used until you update it." ;;
  esac
}

# Set LLAMA_GPU to what llama.cpp is compiled for: Metal on a Mac; on a card of AMD or Intel ROCm or Vulkan, whose compilers
# must be there. Otherwise it uses the processor.
find_llama_gpu() {
  LLAMA_GPU=
  if [ "$SYSTEM" = Darwin ]; then
    LLAMA_GPU=Metal
  elif [ "$CARD_VENDOR" = amd ] && command -v hipcc >/dev/null 2>&1; then
    LLAMA_GPU=ROCm
  elif [ -n "$CARD_VENDOR" ] && command -v glslc >/dev/null 2>&1; then
    LLAMA_GPU=Vulkan
  elif [ -n "$CARD_VENDOR" ]; then
    say "llama.cpp will use the CPU. To use the $CARD_VENDOR card, install a shader compiler and run this again:" \
      "  Debian, Ubuntu:  sudo apt-get install glslc libvulkan-dev"
  fi
  [ -z "$LLAMA_GPU" ] || WHY="$WHY; compiled for $LLAMA_GPU"
}

find_engine() {
  # By the packages of installers/vllm.lock for each processor: some need a newer glibc than the agent.
  case $MACHINE in aarch64 | arm64) VLLM_GLIBC=34 ;; *) VLLM_GLIBC=31 ;; esac
  WHY="your choice"
  CARD='' CARD_VENDOR=''
  CARD_MB=0
  DRIVER=
  # In WSL 2 the program comes with Windows' driver.
  NVIDIA_SMI=$(command -v nvidia-smi 2>/dev/null || true)
  [ -n "$NVIDIA_SMI" ] || [ ! -x /usr/lib/wsl/lib/nvidia-smi ] || NVIDIA_SMI=/usr/lib/wsl/lib/nvidia-smi
  if [ -n "$NVIDIA_SMI" ]; then
    CARD=$(ask_card name)
    CARD_MB=$(ask_card memory.total | tr -cd '0-9')
    CARD_MB=${CARD_MB:-0}
    DRIVER=$(ask_card driver_version)
    [ -n "$CARD" ] || find_silent_card
  fi
  find_torch_build
  check_driver
  if [ "$ENGINE" = auto ]; then
    if [ -n "$CARD" ] && [ -n "$NO_BUILD" ]; then
      ENGINE=torch WHY="$NO_BUILD, so the CPU is used, which is slow"
    elif [ "$TORCH_BUILD" = "$OLDER_BUILD" ]; then
      ENGINE=torch WHY="$CARD is older than vLLM's CUDA supports; torch's build for CUDA 12.6 is used"
    elif [ -n "$CARD" ] && [ "$(ask_card compute_cap)" = 7.5 ]; then
      ENGINE=torch WHY="vLLM refuses bfloat16, in which most models are published, on $CARD"
    elif [ "$CARD_MB" -ge 16000 ] && [ "$SYSTEM" = Linux ] && [ "$GLIBC" -lt "$VLLM_GLIBC" ]; then
      ENGINE=torch WHY="vLLM needs glibc 2.$VLLM_GLIBC on $MACHINE; this system has glibc 2.$GLIBC"
    elif [ "$CARD_MB" -ge 16000 ] && [ "$SYSTEM" = Linux ]; then
      ENGINE=vllm WHY="$CARD has $CARD_MB MB"
    elif [ -n "$CARD" ]; then
      ENGINE=torch WHY="$CARD has $CARD_MB MB; vLLM needs 16 GB"
    elif [ "$SYSTEM" = Darwin ] && command -v cmake >/dev/null 2>&1 && command -v c++ >/dev/null 2>&1; then
      ENGINE=llama WHY="for Apple's Metal"
    elif [ "$SYSTEM" = Darwin ]; then
      ENGINE=torch WHY="for Apple's Metal; llama.cpp, which is compiled here, would need cmake and Xcode's tools"
    elif [ "$TORCH_BUILD" = xpu ]; then
      ENGINE=torch WHY="for an Intel card: torch's build for XPU; it was never tried on one"
    elif [ -n "$TORCH_BUILD" ] && [ "$TORCH_BUILD" != cpu ]; then
      ENGINE=torch WHY="for an AMD card: torch's build for ROCm; it was never tried on one"
    elif [ -n "$NO_BUILD" ]; then
      ENGINE=torch WHY="$NO_BUILD. Until then the CPU is used, which is slow"
    else
      ENGINE=torch WHY="no GPU detected, so the CPU is used, which is slow; if you have a GPU, install its driver"
    fi
  fi
  case $ENGINE in
    vllm)
      [ -n "$CARD" ] || die "vLLM needs an NVIDIA GPU, but nvidia-smi reports none." \
        "If you have one, install its driver. Without a GPU, use --engine torch."
      [ -z "$NO_BUILD" ] || die "vLLM does not support $CARD, and $NO_BUILD." "Use --engine torch: it samples on the CPU."
      [ "$TORCH_BUILD" != "$OLDER_BUILD" ] || die "vLLM's CUDA does not support $CARD, which is older than Turing." \
        "Use --engine torch: it also uses this GPU."
      [ "$GLIBC" -ge "$VLLM_GLIBC" ] || \
        die "vLLM needs glibc 2.$VLLM_GLIBC or newer on $MACHINE; this system has glibc 2.$GLIBC." \
          "Use --engine torch: it also uses the GPU." ;;
    llama)
      find_llama_gpu
      command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || \
        die "llama.cpp is compiled on your machine, but no C++ compiler was found." \
          "Debian, Ubuntu:  sudo apt-get install g++" "macOS:           xcode-select --install" \
          "Or use --engine torch, which needs no compiler." ;;
  esac
}

# On x86-64 Linux the package index has torch with CUDA only; other cards, and a machine without one, get another build.
wants_cpu_build() { [ "$ENGINE-$TORCH_BUILD" = torch-cpu ]; }
wants_other_build() { [ "$ENGINE" = torch ] && [ -n "$TORCH_BUILD" ]; }

# Size of the environment in MB, with some space for the download.
needed_mb() {
  case $ENGINE in
    vllm) echo 14000 ;;
    torch) case $SYSTEM-$MACHINE-$TORCH_BUILD in
        Linux-x86_64-rocm*) echo 20000 ;;
        Linux-x86_64- | Linux-x86_64-cu* | Linux-x86_64-xpu) echo 9000 ;;
        *) echo 1800 ;;
      esac ;;
    *) echo 900 ;;
  esac
}

# Sizes of the packages of the agent and of an engine, as their index gives them.
download_size() {
  case $1 in
    vllm) echo 4.1 GB ;;
    torch) case $SYSTEM-$MACHINE-$TORCH_BUILD in
        Linux-x86_64-rocm*) echo 6 GB ;;
        Linux-x86_64- | Linux-x86_64-cu* | Linux-x86_64-xpu) echo 2.9 GB ;;
        *) echo 0.4 GB ;;
      esac ;;
    llama) echo 0.2 GB ;;
    *) echo 0.1 GB ;;
  esac
}

# Print the sizes of the engines that could be chosen instead.
other_sizes() {
  others=
  for other in vllm torch llama none; do
    [ "$other" != "$ENGINE" ] || continue
    [ "$other" != vllm ] || { [ -n "$CARD" ] && [ "$SYSTEM" = Linux ]; } || continue
    others="$others${others:+, }$other $(download_size "$other")"
  done
  printf '%s' "$others"
}

check_disk() {
  place=$PREFIX
  while [ ! -d "$place" ]; do place=$(dirname "$place"); done
  [ -w "$place" ] || die "You have no permission to write to $place." "Choose another folder with --prefix."
  free_mb=$(df -Pk "$place" | awk 'NR == 2 { print int($4 / 1024) }')
  wanted_mb=${ECHO_SWARM_NEEDED_MB:-$(needed_mb)}
  [ "$free_mb" -ge "$wanted_mb" ] || die "$place has $free_mb MB free; engine $ENGINE needs about $wanted_mb MB." \
    "Free space, choose another folder with --prefix, or a smaller engine with --engine."
}

# --- the steps --------------------------------------------------------------------------------------------------------

# Resolve links in the folder's name: running agents are recognised by it.
settle() { PREFIX=$(cd "$PREFIX" && pwd -P); }

# Allow one installer at a time: the first one creates the folder, and writes its process id there.
lock() {
  mkdir -p "$PREFIX/versions"
  settle
  if ! mkdir "$PREFIX/lock" 2>/dev/null; then
    other=$(cat "$PREFIX/lock/pid" 2>/dev/null || true)
    if [ -n "$other" ] && kill -0 "$other" 2>/dev/null; then
      die "Another installation is running (process $other)." "Wait until it ends."
    fi
    rm -rf "$PREFIX/lock"
    mkdir "$PREFIX/lock"
  fi
  echo $$ >"$PREFIX/lock/pid"
  trap 'rm -rf "$PREFIX/lock"' EXIT
  trap 'exit 130' INT TERM HUP
}

pip() { "$TARGET/bin/python" -m pip --no-input --disable-pip-version-check "$@" </dev/null >>"$LOG" 2>&1; }

# While a step runs, show what pip downloads, and for how long: on a terminal in one line that is rewritten every second,
# elsewhere as a line every ten seconds. It ends with the step, and with this script, however that ends.
show_progress() {
  seconds=0
  while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    seconds=$((seconds + 1))
    [ -t 1 ] || [ $((seconds % ${ECHO_SWARM_PROGRESS_S:-10})) = 0 ] || continue
    # The last line is of the package that is under way; its size is in brackets, if pip knows it.
    current=$(tail -n "+$((step_begins + 1))" "$LOG" | sed -n -e 's|^ *Downloading .*/|Downloading |p' -e 's|^ *Downloading \([^/]*\)$|Downloading \1|p' \
      -e 's|^ *\(Building wheel for .*\)|\1|p' -e 's|^Installing collected .*|installing the packages|p' |
      tail -n 1 | cut -c 1-70)
    if [ -t 1 ]; then
      printf '\r    %d s  %s\033[K' "$seconds" "$current"
    else
      say "    $seconds s  $current"
    fi
  done
}

step() {
  say "  $1 …"
  shift
  step_begins=$(awk 'END { print NR }' "$LOG")
  show_progress &
  progress=$!
  done_well=
  "$@" && done_well=yes
  kill "$progress" 2>/dev/null || true
  wait "$progress" 2>/dev/null || true
  [ ! -t 1 ] || printf '\r\033[K'
  [ -z "$done_well" ] || return 0
  printf '%s: this step failed. The last lines of %s:\n' "$PROGRAM" "$SHOWN_LOG" >&2
  tail -n 12 "$LOG" | sed 's/^/    /' >&2
  ! grep -q "No matching distribution found for $PACKAGE" "$LOG" || \
    die "No release of $PACKAGE${VERSION:+ $VERSION} was found. The previously installed version, if any, is unchanged." \
      "With a checkout of the repository:  sh installers/install.sh builds the agent there" \
      "With a wheel:  give its folder with --find-links FOLDER" \
      "If these lines name the network, restore it and run this again."
  die "The previously installed version, if any, is unchanged." \
    "Fix the problem that these lines name (most often the network or a full disk), and run this again."
}

make_environment() {
  if [ -n "$UV" ]; then
    "$UV" venv --quiet --seed --python "$PYTHON" "$TARGET" >>"$LOG" 2>&1
  else
    "$PYTHON" -m venv "$TARGET" >>"$LOG" 2>&1
  fi
}

# The build backend is checked against its hashes, too; nothing is written into the checkout.
build_wheel() {
  pip install --no-deps --require-hashes --only-binary :all: --target "$DOWNLOAD/build" -r "$SOURCE/installers/build.lock" &&
    (export PYTHONPATH="$DOWNLOAD/build"
     pip wheel --no-deps --no-build-isolation --wheel-dir "$DOWNLOAD" "$SOURCE")
}

# The coordinator that served this script serves the wheel, too; the script names its hash.
download_from_round() {
  SHA256=${SHA256:-$ROUND_WHEEL_SHA256}
  "$TARGET/bin/python" - "${ROUND_JOIN%%#*}/install/$ROUND_WHEEL" "$DOWNLOAD/$ROUND_WHEEL" >>"$LOG" 2>&1 <<'PYTHON'
import shutil, sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=60) as reply, open(sys.argv[2], "xb") as file:
    shutil.copyfileobj(reply, file)
PYTHON
}

fetch() {
  rm -rf "$DOWNLOAD"
  mkdir -p "$DOWNLOAD"
  if [ -n "$SOURCE" ]; then
    build_wheel || return 1
  elif [ -n "$ROUND_WHEEL" ]; then
    download_from_round || return 1
  else
    set -- --no-deps --only-binary :all: --dest "$DOWNLOAD" "$PACKAGE${VERSION:+==$VERSION}"
    [ -z "$FIND_LINKS" ] || set -- --find-links "$FIND_LINKS" "$@"
    pip download "$@" || return 1
  fi
  WHEEL=$(ls "$DOWNLOAD"/echo_swarm-*.whl) || return 1
  [ -z "$SHA256" ] || "$TARGET/bin/python" - "$WHEEL" "$SHA256" >>"$LOG" 2>&1 <<'PYTHON'
import hashlib, pathlib, sys
digest = hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest()
sys.exit(f"{sys.argv[1]} has the SHA-256 {digest}, not {sys.argv[2]}" if digest != sys.argv[2].lower() else 0)
PYTHON
}

obtain() {
  step "creating an environment with $PYTHON" make_environment
  if [ -n "$SOURCE" ]; then
    step "building $PACKAGE from $SOURCE" fetch
  elif [ -n "$ROUND_WHEEL" ]; then
    step "downloading $ROUND_WHEEL from ${ROUND_JOIN%%#*}" fetch
  else
    step "downloading $PACKAGE, ${VERSION:-newest version}" fetch
  fi
}

# Obtain the agent's wheel in a temporary folder: whatever stops the installation there stops the dry run, too.
rehearse() {
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  trap 'exit 130' INT TERM HUP
  TARGET=$scratch/environment DOWNLOAD=$scratch/download LOG=$scratch/install.log SHOWN_LOG="its log"
  : >"$LOG"
  export PIP_NO_CACHE_DIR=1
  say "Trying the first steps in a temporary folder:"
  obtain
  if [ -n "$JOIN" ]; then
    "$PYTHON" -m zipfile -e "$WHEEL" "$DOWNLOAD/wheel" >>"$LOG" 2>&1 || die "$WHEEL is damaged."
    say "Would write $SERVICE:"
    fill_service "$DOWNLOAD/wheel/swarm_node/installation/$TEMPLATE" | sed 's/^/  /'
  fi
  say "Dry run: nothing was changed."
}

# Obtain uv, and set NO_INDEX and uv's variables by pip's configuration. The names of indexes may contain passwords: they
# are in no argument of a program, which every user of the machine can read.
obtain_uv() {
  pip install --no-deps --require-hashes --only-binary :all: --target "$DOWNLOAD/uv" -r "$LISTS/uv.lock" \
    ${FIND_LINKS:+--find-links "$FIND_LINKS"} || return 1
  UV_SETTINGS=$("$TARGET/bin/python" - "$FIND_LINKS" 2>>"$LOG" <<'PYTHON'
import ast, shlex, subprocess, sys
SECTIONS = ("global", "install", ":env:")  # a later one wins
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "trusted-host": "UV_INSECURE_HOST",
    "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT", "proxy": "ALL_PROXY",
    "constraint": "UV_CONSTRAINT",  # beside hashes uv accepts none: pip installs the lists then
}
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=True)
found = {}
for line in listed.stdout.splitlines():
    name, _, value = line.partition("=")
    section, _, key = name.rpartition(".")
    if section in SECTIONS:
        found[SECTIONS.index(section), key] = ast.literal_eval(value)
settings = {key: value for (_, key), value in sorted(found.items())}
lists = {key: [value] if key.endswith("cert") else value.split() for key, value in settings.items() if key in VARIABLES}
if sys.argv[1]:
    lists.setdefault("find-links", []).append(sys.argv[1])
for key, words in lists.items():
    print(f"export {VARIABLES[key]}={shlex.quote((',' if key == 'find-links' else ' ').join(words))}")
no_index = settings.get("no-index", "").lower() in ("1", "true", "t", "yes", "y", "on")
print("NO_INDEX=" + ("--no-index" if no_index else ""))
PYTHON
)
}

# Install packages by uv. The variables are set for uv alone: programs that the script starts later do not get them.
install_by_uv() {
  (
    eval "$UV_SETTINGS"
    # As pip does: no index counts more than another.
    export UV_INDEX_STRATEGY=unsafe-best-match UV_NO_CONFIG=1
    # The installed files are hard links into the cache, and both are removed together. Root's cache belongs to root in
    # any case, also where sudo keeps another user's HOME.
    export UV_CACHE_DIR="$PREFIX/cache"
    # The packages of root serve users who cannot write beside them.
    [ "$(id -u)" != 0 ] || export UV_COMPILE_BYTECODE=1
    exec "$DOWNLOAD/uv/bin/uv" pip install ${NO_INDEX:+"$NO_INDEX"} "$@" </dev/null >>"$LOG" 2>&1
  )
}

# Install packages for a Python, by uv or else by pip; the options are those that both have.
packages() {
  for_python=$1
  shift
  if [ -x "$DOWNLOAD/uv/bin/uv" ]; then
    install_by_uv --python "$for_python" "$@" && return
    say "uv failed; pip tries." >>"$LOG"
  fi
  [ -z "$FIND_LINKS" ] || set -- --find-links "$FIND_LINKS" "$@"
  # A package that pip builds imports from its own folder, into which pip has just unpacked it: -P is for pip alone.
  env -u PYTHONSAFEPATH "$for_python" -P -m pip --no-input --disable-pip-version-check install "$@" \
    </dev/null >>"$LOG" 2>&1
}

# The wheel contains the list of its dependencies, with the hash of each file.
install_agent() {
  "$TARGET/bin/python" -m zipfile -e "$WHEEL" "$DOWNLOAD/wheel" >>"$LOG" 2>&1 || return 1
  LISTS=$DOWNLOAD/wheel/swarm_node/installation
  obtain_uv || rm -rf "$DOWNLOAD/uv"
  packages "$TARGET/bin/python" --no-deps --require-hashes -r "$LISTS/node.lock" &&
    packages "$TARGET/bin/python" --no-deps "$WHEEL"
}

# pip's own configuration counts first: it may name an index that has CPU builds.
pip_has_cpu_build() { "$TARGET/bin/python" -m pip index versions torch </dev/null 2>>"$LOG" | grep -q '+cpu'; }

# uv knows the index of each of torch's builds; pip does not.
install_other_build() {
  [ -x "$DOWNLOAD/uv/bin/uv" ] || obtain_uv || return 1
  install_by_uv --python "$TARGET/bin/python" --torch-backend "$TORCH_BUILD" --only-binary :all: \
    -c "$LISTS/constraints.txt" torch transformers
}

install_engine() {
  case $ENGINE in
    torch)
      if wants_other_build && ! { wants_cpu_build && pip_has_cpu_build; }; then
        install_other_build
      else
        packages "$TARGET/bin/python" --only-binary :all: -c "$LISTS/constraints.txt" torch transformers
      fi ;;
    llama)
      # Without its library for command lines: a third of the time.
      echo 'set(LLAMA_BUILD_COMMON OFF)' >"$LISTS/llama.cmake"
      CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(printf %s "$LISTS" | sed 's/ /\\ /g')/llama.cmake"
      case $LLAMA_GPU in
        Metal) CMAKE_ARGS="-DGGML_METAL=on $CMAKE_ARGS" ;;
        Vulkan) CMAKE_ARGS="-DGGML_VULKAN=on $CMAKE_ARGS" ;;
        ROCm) CMAKE_ARGS="-DGGML_HIP=on $CMAKE_ARGS" ;;
      esac
      export CMAKE_ARGS
      pip install -c "$LISTS/constraints.txt" llama-cpp-python gguf ;;
    vllm) "$TARGET/bin/python" -m venv "$TARGET/vllm" >>"$LOG" 2>&1 &&
      packages "$TARGET/vllm/bin/python" --no-deps --only-binary :all: --require-hashes -r "$LISTS/vllm.lock" ;;
  esac
}

engine_modules() {
  case $ENGINE in
    torch) case $TORCH_BUILD in
        cpu) echo 'import torch, transformers; assert torch.version.cuda is None' ;;
        rocm*) echo 'import torch, transformers; assert torch.version.hip, "this torch is not built for ROCm"' ;;
        xpu) echo 'import torch, transformers; assert torch.version.xpu, "this torch is not built for XPU"' ;;
        *) echo 'import torch, transformers' ;;
      esac ;;
    llama) echo 'import llama_cpp, gguf' ;;
    *) echo 'pass' ;;
  esac
}

check_itself() {
  "$TARGET/bin/swarm-node" --version >"$DOWNLOAD/version" 2>>"$LOG" &&
    "$TARGET/bin/python" -P -c "import swarm_node.p2p.host; $(engine_modules)" >>"$LOG" 2>&1 || return 1
  [ "$ENGINE" != vllm ] || "$TARGET/vllm/bin/python" -c 'import vllm' >>"$LOG" 2>&1
}

# Commands of root use the home of the service's agent by default.
home_of_service() {
  [ "$(id -u)" != 0 ] || printf '%s' "export SWARM_HOME=\"\${SWARM_HOME:-$NODE_HOME}\""
}

# The new link replaces the old one atomically: the name always leads to a complete version. An agent and the engines that
# it starts later are of the same version.
switch() {
  rm -f "$PREFIX/current.new"
  ln -s "versions/${TARGET##*/}" "$PREFIX/current.new"
  "$PYTHON" -c 'import os, sys; os.replace(*sys.argv[1:])' "$PREFIX/current.new" "$PREFIX/current"
  mkdir -p "$BIN"
  cat >"$BIN/swarm-node.new" <<TEXT
#!/bin/sh
# Created by the installer of Echo Swarm; \`install.sh --uninstall\` removes it.
version=\$(cd '$PREFIX/current' && pwd -P) || exit 1
$(home_of_service)
[ ! -x "\$version/vllm/bin/python" ] || export SWARM_VLLM_PYTHON="\${SWARM_VLLM_PYTHON:-\$version/vllm/bin/python}"
exec "\$version/bin/swarm-node" "\$@"
TEXT
  chmod 755 "$BIN/swarm-node.new"
  mv -f "$BIN/swarm-node.new" "$BIN/swarm-node"
}

# Print `PID VERSION COMMAND` of every process of an installed version, recognised by its interpreter's path.
running() {
  if [ -e /proc/self/cmdline ]; then
    { grep -aslF "$PREFIX/versions/" /proc/[0-9]*/cmdline || true; } | while IFS= read -r file; do
      pid=${file%/cmdline}
      printf '%s %s\n' "${pid#/proc/}" "$(tr '\0' ' ' 2>/dev/null <"$file")"
    done
  else
    ps -axww -o pid= -o command=
  fi | while read -r pid line; do
    case $line in "$PREFIX"/versions/*)
      line=${line#"$PREFIX"/versions/}
      printf '%s %s %s\n' "$pid" "${line%%/*}" "${line#*/swarm-node }" ;;
    esac
  done
}

# Print `PID COMMAND` of agents of other versions than this one; their engines end with them.
agents_but() {
  running | while read -r pid version words; do
    case $version-$words in
      "$1"-*) ;;
      *"-join "* | *"-mirror "*) printf '%s %s\n' "$pid" "${words% }" ;;
    esac
  done
}

# Print the command that ends an agent; an agent that samples first finishes its work.
ending() {
  case $2 in mirror*) printf 'kill -INT %s' "$1"; return ;; esac
  case $2 in
    *"--home "*) home=${2##*--home } ;;
    *"--home="*) home=${2##*--home=} ;;
    *) home= ;;
  esac
  printf 'swarm-node finish%s' "${home:+ --home ${home%% *}}"
}

tell_of_agents() {
  agents_but "${TARGET##*/}" | while read -r pid words; do
    say "Process $pid still runs the previous version: swarm-node $words" \
      "  Next:  run $(ending "$pid" "$words"). When it has ended, start the agent again with the same command."
  done
}

# Remove every version except the new one, the previous one, and running ones.
tidy_up() {
  used=$(running | cut -d ' ' -f 2)
  for folder in "$PREFIX"/versions/*; do
    case $folder in "$TARGET" | "$BEFORE") continue ;; esac
    printf '%s\n' "$used" | grep -qxF "${folder##*/}" || rm -rf "$folder"
  done
  rm -rf "$DOWNLOAD"
}

install() {
  lock
  BEFORE=$(readlink "$PREFIX/current" 2>/dev/null || true)
  BEFORE=${BEFORE:+$PREFIX/$BEFORE}
  TARGET=$PREFIX/versions/$(date +%Y%m%d-%H%M%S)-$$
  DOWNLOAD=$PREFIX/download LOG=$PREFIX/install.log SHOWN_LOG=$PREFIX/install.log
  : >"$LOG"
  say "Installing into $PREFIX (details in install.log there):"
  obtain
  step "installing the agent and its dependencies, each checked against its hash" install_agent
  [ "$ENGINE" = none ] || step "installing engine $ENGINE (most of about $(download_size "$ENGINE"))" install_engine
  step "checking that everything starts" check_itself
  step "switching to the new version" switch
  tidy_up
  say "Installed: $("$BIN/swarm-node" --version)."
}

# The script does not change the firewall: it only prints the command.
say_port() {
  say "Other nodes fetch from this node on TCP port 8703, or the next free port up to 8710." \
    "Opening the port is optional, but helps the round:"
  case $SYSTEM in
    Darwin) say "  When macOS asks whether swarm-node may accept connections, allow it." ;;
    *) if command -v firewall-cmd >/dev/null 2>&1; then
        say "  sudo firewall-cmd --permanent --add-port=8703-8710/tcp && sudo firewall-cmd --reload"
      elif command -v nft >/dev/null 2>&1 && ! command -v ufw >/dev/null 2>&1; then
        say "  sudo nft add rule inet filter input tcp dport 8703-8710 accept"
      else
        say "  sudo ufw allow 8703:8710/tcp"
      fi ;;
  esac
  say "To open no port, add --no-share to swarm-node join."
}

say_next() {
  JOIN_WORDS=HOST
  [ -z "$ROUND_JOIN" ] || JOIN_WORDS="'$ROUND_JOIN'"
  [ -z "$(agents_but "${TARGET##*/}")" ] || return 0
  if [ "$ENGINE" = none ]; then
    say "No engine was installed: this node cannot sample. It can mirror versions and verify a ledger." \
      "To sample, run this again with --engine torch."
    JOIN_COMMAND="mirror"
  else
    JOIN_COMMAND="join"
  fi
  case :$PATH: in
    *:"$BIN":*) say "Next:  swarm-node $JOIN_COMMAND $JOIN_WORDS" ;;
    *) say "$BIN is not on your PATH. Next:  $BIN/swarm-node $JOIN_COMMAND $JOIN_WORDS" ;;
  esac
  [ -n "$ROUND_JOIN" ] || say "HOST is the round's address or join string, which the page of the round shows."
}

# --- services ---------------------------------------------------------------------------------------------------------

# Set the template in the wheel, and the path of the service file.
find_service() {
  case $SYSTEM-$(id -u) in
    Darwin-*) TEMPLATE=launchd.plist SERVICE=$HOME/Library/LaunchAgents/org.echo-swarm.node.plist ;;
    *-0) TEMPLATE=system.service SERVICE=/etc/systemd/system/swarm-node.service CONTROL="systemctl" ;;
    *) TEMPLATE=user.service SERVICE=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/swarm-node.service CONTROL="systemctl --user" ;;
  esac
}

# Print the service file, filled in from this template.
fill_service() {
  "$PYTHON" - "$1" "$BIN/swarm-node" "$JOIN" <<'PYTHON'
import pathlib, sys
template, program, join = sys.argv[1:]
text = pathlib.Path(template).read_text().replace("@PROGRAM@", program).replace("@JOIN@", join)
sys.stdout.write(text)
PYTHON
}

install_service() {
  mkdir -p "$(dirname "$SERVICE")"
  folder=$(ls -d "$PREFIX"/current/lib/python3.*/site-packages/swarm_node/installation)
  fill_service "$folder/$TEMPLATE" >"$SERVICE"
  say "Service file: $SERVICE"
  if [ "$SYSTEM" = Darwin ]; then
    restart_service
  elif $CONTROL daemon-reload 2>/dev/null; then
    $CONTROL enable swarm-node.service
    restart_service
    [ "$(id -u)" = 0 ] || say "It runs while you are logged in. To run it always: loginctl enable-linger"
  else
    say "systemd is not running here. When it is, run:  $CONTROL enable --now swarm-node.service"
  fi
}

# A service that its owner has stopped, or that runs another installation, is not restarted.
service_runs() {
  grep -qF "$BIN/swarm-node" "$SERVICE" 2>/dev/null || return 1
  case $SYSTEM in
    Darwin) launchctl list org.echo-swarm.node 2>/dev/null | grep -q '"PID"' ;;
    *) $CONTROL is-active --quiet swarm-node.service 2>/dev/null ;;
  esac
}

# The running agent returns its leases, stores finished work for the next agent to send, and ends.
restart_service() {
  if [ "$SYSTEM" = Darwin ]; then
    launchctl unload "$SERVICE" 2>/dev/null || true
    launchctl load -w "$SERVICE" && say "The service is running the new version." && return
    die "The new version is installed, but its service did not restart. Run:" "launchctl load -w $SERVICE"
  fi
  $CONTROL restart swarm-node.service && say "The service is running the new version." && return
  die "The new version is installed, but its service did not restart. For the reason, run:" "$CONTROL status swarm-node.service"
}

remove_service() {
  [ -e "$SERVICE" ] || return 0
  case $SYSTEM in
    Darwin) launchctl unload -w "$SERVICE" 2>/dev/null || true ;;
    *) $CONTROL disable --now swarm-node.service 2>/dev/null || true ;;
  esac
  rm -f "$SERVICE"
}

uninstall() {
  [ -e "$PREFIX/versions" ] || [ -e "$BIN/swarm-node" ] || die "Nothing is installed in $PREFIX." "Give the installation folder with --prefix."
  if [ -n "$DRY_RUN" ]; then
    say "Would remove $PREFIX/{versions,current,lock,download,cache,install.log} and $BIN/swarm-node."
    [ ! -e "$SERVICE" ] || say "Would stop and remove the service $SERVICE."
    [ ! -d "$NODE_HOME" ] || say "Would ${PURGE:+not }keep the node's keys and receipts in $NODE_HOME."
    return
  fi
  remove_service
  [ ! -d "$PREFIX" ] || settle
  agents_but none | {
    if read -r pid words; then
      die "Process $pid is still running: swarm-node $words" "Run $(ending "$pid" "$words"). When it has ended, run this again."
    fi
  }
  rm -rf "$PREFIX/versions" "$PREFIX/current" "$PREFIX/current.new" "$PREFIX/download" "$PREFIX/lock" "$PREFIX/cache" \
    "$PREFIX/install.log"
  if grep -q 'installer of Echo Swarm' "$BIN/swarm-node" 2>/dev/null; then rm -f "$BIN/swarm-node"; fi
  rmdir "$PREFIX" 2>/dev/null || true
  if [ -n "$PURGE" ]; then
    rm -rf "$NODE_HOME"
    say "Removed, including the node's keys."
  elif [ -d "$NODE_HOME" ]; then
    say "Removed. The node's keys and receipts are kept in $NODE_HOME."
  else
    say "Removed."
  fi
}

agent_source() {
  if [ -n "$SOURCE" ]; then
    printf 'built from %s' "$SOURCE"
  elif [ -n "$ROUND_WHEEL" ]; then
    printf '%s from %s' "$ROUND_WHEEL" "${ROUND_JOIN%%#*}"
  else
    printf '%s of %s%s' "${VERSION:-newest version}" "$PACKAGE" "${FIND_LINKS:+, also from $FIND_LINKS}"
  fi
}

main() {
  parse "$@"
  find_system
  find_service
  if [ "$ACTION" = uninstall ]; then uninstall; return; fi
  find_python
  find_source
  find_engine
  check_disk
  say "Engine:   $ENGINE ($WHY)"
  say "Agent:    $(agent_source)"
  say "Python:   $PYTHON${UV:+, with $UV for environments}"
  say "Download: about $(download_size "$ENGINE"); with another --engine: $(other_sizes)"
  say "Folder:   $PREFIX, needs about $wanted_mb MB of $free_mb MB free" "Command:  $BIN/swarm-node"
  if [ -n "$JOIN" ]; then
    say "Service:  $SERVICE"
  elif service_runs; then
    say "Service:  $SERVICE, which stops cleanly and restarts with the new version"
  fi
  if [ -n "$DRY_RUN" ]; then rehearse; return; fi
  install
  say_port
  if [ -n "$JOIN" ]; then
    install_service
  elif service_runs; then
    restart_service
  else
    say_next
  fi
  tell_of_agents
}

main "$@"
