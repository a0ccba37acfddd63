#!/bin/sh
# Installs the Echo Swarm node agent: for one user, or, run by root, for the machine.
#
# - Everything lies below one folder, each version in an environment of its own; nothing of the system's is changed.
# - A version counts when `current` points to it, which happens in one step, after it has passed its own check. Whatever
#   interrupts this script leaves the version before as it was; run it again.
# - The agent's packages, and vLLM's, are those of the version's own lists, each checked against its hash. torch,
#   transformers and llama.cpp are pinned by version alone, what they bring in turn by version where a list names it.
# - Nothing is compiled but llama.cpp, which is built for this processor.
# - What this machine cannot do is said before anything is changed.
# - Keys and receipts live in the node's home, which no option but --purge ever touches.
# - No code is taken from under an agent that runs: the service leaves cleanly and starts again with the new version, an
#   agent that was started by hand is named with the next step, and a version that runs is never removed.
set -eu

# What lies where root happens to stand, such as /tmp, is no module of ours.
export PYTHONSAFEPATH=1

PROGRAM=${0##*/}
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
PURGE=

usage() {
  cat <<TEXT
usage: $PROGRAM [options]

Installs or updates swarm-node, the agent that lends this machine to a training round.

  --engine E         what samples: auto, torch, llama, vllm or none. auto takes vllm for an NVIDIA card of 16 GB or
                     more, llama on a Mac, or torch
  --version X        install version X instead of the newest
  --find-links DIR   take packages from this folder, too (a wheel that you built or downloaded)
  --sha256 HEX       refuse a wheel of echo-swarm with another hash
  --python PATH      the Python to use; otherwise the first of python3.13 … python3.11, python3 that fits
  --prefix DIR       where everything goes ($PREFIX)
  --bin DIR          where the command goes ($BIN)
  --service JOIN     also start the agent with this machine (or, without root, when you log in), for the round at JOIN
  --dry-run          say what would be done, and do nothing
  --uninstall        remove everything that this script has installed; the node's keys stay
  --purge            with --uninstall: remove the node's home with its keys as well
  --help             this text

Run it again to update. pip's own configuration (index, proxy, certificates) is respected.
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
      *) printf '%s: there is no option %s\n\n' "$PROGRAM" "$1" >&2; usage >&2; exit 2 ;;
    esac
    shift
  done
  case $ENGINE in
    auto | torch | llama | vllm | none) ;;
    *) printf '%s: --engine is auto, torch, llama, vllm or none, not %s\n' "$PROGRAM" "$ENGINE" >&2; exit 2 ;;
  esac
  [ -z "$PURGE" ] || [ "$ACTION" = uninstall ] || { printf '%s: --purge goes with --uninstall\n' "$PROGRAM" >&2; exit 2; }
  case $JOIN in
    *[!A-Za-z0-9:/.#_-]*) printf '%s: %s is no join string\n' "$PROGRAM" "$JOIN" >&2; exit 2 ;;
  esac
  case $PREFIX in /*) ;; *) PREFIX=$PWD/$PREFIX ;; esac
  case $BIN in /*) ;; *) BIN=$PWD/$BIN ;; esac
}

# --- what this machine is ---------------------------------------------------------------------------------------------

find_system() {
  SYSTEM=$(uname -s)
  MACHINE=$(uname -m)
  case $SYSTEM in
    Linux | Darwin) ;;
    *) die "swarm-node runs on Linux and macOS, and this is $SYSTEM." "On Windows use install.ps1, which installs into WSL 2." ;;
  esac
  case $MACHINE in
    x86_64 | amd64 | aarch64 | arm64) ;;
    *) die "There are no packages for processors of kind $MACHINE." "x86-64 and 64-bit ARM are supported." ;;
  esac
  if [ "$SYSTEM" = Darwin ] && [ "$MACHINE" = x86_64 ]; then
    die "Macs with Intel processors are not supported: torch has no builds for them any more."
  fi
  GLIBC=0
  [ "$SYSTEM" = Linux ] || return 0
  LIBC=$({ ldd --version 2>&1 || true; } | head -n 1)
  case $LIBC in
    *GNU* | *GLIBC* | *glibc*) ;;
    *) die "This Linux has no glibc, for which torch and vLLM are built." "Use a container with Debian on it: see the Dockerfile." ;;
  esac
  GLIBC=$(printf '%s' "${LIBC##* 2.}" | sed 's/[^0-9].*//')
  [ "${GLIBC:-0}" -ge 28 ] || die "Every package is built for glibc 2.28 or newer, and this system has 2.${GLIBC:-?}." \
    "Use a newer release of it, or a container with Debian on it: see the Dockerfile."
}

# Python 3.14 would have to compile coincurve, which libp2p asks for.
new_enough() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

find_python() {
  if [ -n "$PYTHON" ]; then
    new_enough "$PYTHON" || die "$PYTHON is not a Python of 3.11 to 3.13." "Name another with --python."
  else
    for candidate in python3.13 python3.12 python3.11 python3; do
      if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then PYTHON=$(command -v "$candidate"); break; fi
    done
  fi
  [ -n "$PYTHON" ] || die "Python 3.11, 3.12 or 3.13 is needed, and none was found." \
    "Debian, Ubuntu:  sudo apt-get install python3 python3-venv" \
    "Fedora:          sudo dnf install python3.13" \
    "macOS:           brew install python@3.12" \
    "Or name one with --python PATH."
  UV=$(command -v uv 2>/dev/null || true)
  if [ -z "$UV" ] && ! "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    die "$PYTHON cannot make environments: Debian and Ubuntu keep that apart." "sudo apt-get install python3-venv" \
      "Or install uv, which this script uses where it is there."
  fi
}

# torch and vLLM are built for CUDA 13, and NVIDIA's table names the oldest driver for that. One that does not report its
# version is not judged.
DRIVER_MIN=580

check_driver() {
  case $DRIVER in [0-9]*.*) ;; *) return 0 ;; esac
  [ "${DRIVER%%.*}" -lt "$DRIVER_MIN" ] || return 0
  case $ENGINE in
    auto | vllm) die "The NVIDIA driver is $DRIVER, and torch and vLLM need $DRIVER_MIN or newer (CUDA 13)." \
      "Ubuntu:  sudo ubuntu-drivers install, and restart the machine" \
      "Windows: update NVIDIA's driver in Windows, not inside WSL" \
      "Or --engine torch, which samples on the processor until the driver is newer." ;;
    torch) say "The NVIDIA driver is $DRIVER, and torch needs $DRIVER_MIN or newer: it samples on the processor until then." ;;
  esac
}

find_engine() {
  # By what installers/vllm.lock resolves to on each: some of it is built for newer systems than the agent is.
  case $MACHINE in aarch64 | arm64) VLLM_GLIBC=34 ;; *) VLLM_GLIBC=31 ;; esac
  WHY="as you said"
  CARD=
  CARD_MB=0
  DRIVER=
  if command -v nvidia-smi >/dev/null 2>&1; then
    CARD=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 || true)
    CARD_MB=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1 | tr -cd '0-9')
    CARD_MB=${CARD_MB:-0}
    DRIVER=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
  fi
  check_driver
  if [ "$ENGINE" = auto ]; then
    if [ "$CARD_MB" -ge 16000 ] && [ "$SYSTEM" = Linux ] && [ "$GLIBC" -lt "$VLLM_GLIBC" ]; then
      ENGINE=torch WHY="vLLM is built for glibc 2.$VLLM_GLIBC here, and this system has 2.$GLIBC"
    elif [ "$CARD_MB" -ge 16000 ] && [ "$SYSTEM" = Linux ]; then
      ENGINE=vllm WHY="$CARD has $CARD_MB MB"
    elif [ -n "$CARD" ]; then
      ENGINE=torch WHY="$CARD has $CARD_MB MB, vLLM wants 16 GB"
    elif [ "$SYSTEM" = Darwin ] && command -v cmake >/dev/null 2>&1 && command -v c++ >/dev/null 2>&1; then
      ENGINE=llama WHY="for Apple's Metal"
    else
      ENGINE=torch WHY="no graphics card was found"
    fi
  fi
  case $ENGINE in
    vllm)
      [ -n "$CARD" ] || die "vLLM needs an NVIDIA card, and nvidia-smi shows none." "--engine torch samples without one."
      [ "$GLIBC" -ge "$VLLM_GLIBC" ] || \
        die "vLLM is built for glibc 2.$VLLM_GLIBC or newer on $MACHINE, and this system has 2.$GLIBC." \
          "--engine torch samples with the card, too." ;;
    llama)
      command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || \
        die "llama.cpp is compiled for your machine, and there is no C++ compiler." \
          "Debian, Ubuntu:  sudo apt-get install g++" "macOS:           xcode-select --install" \
          "--engine torch needs none." ;;
  esac
}

# In MB: what the environment takes, with some room for the download.
needed_mb() {
  case $ENGINE in
    vllm) echo 14000 ;;
    torch) if [ "$SYSTEM" = Linux ] && [ "$MACHINE" != aarch64 ]; then echo 9000; else echo 1800; fi ;;
    *) echo 900 ;;
  esac
}

check_disk() {
  place=$PREFIX
  while [ ! -d "$place" ]; do place=$(dirname "$place"); done
  [ -w "$place" ] || die "$place is not yours to write." "Choose a folder with --prefix."
  free_mb=$(df -Pk "$place" | awk 'NR == 2 { print int($4 / 1024) }')
  wanted_mb=${ECHO_SWARM_NEEDED_MB:-$(needed_mb)}
  [ "$free_mb" -ge "$wanted_mb" ] || die "$place has $free_mb MB free, and engine $ENGINE wants about $wanted_mb." \
    "Make room, choose a folder with --prefix, or a smaller engine with --engine."
}

# --- the steps --------------------------------------------------------------------------------------------------------

# One name for the folder, whatever links led to it: what runs is known by it.
settle() { PREFIX=$(cd "$PREFIX" && pwd -P); }

# One installer at a time: the folder is made by whoever comes first, and names its process.
lock() {
  mkdir -p "$PREFIX/versions"
  settle
  if ! mkdir "$PREFIX/lock" 2>/dev/null; then
    other=$(cat "$PREFIX/lock/pid" 2>/dev/null || true)
    if [ -n "$other" ] && kill -0 "$other" 2>/dev/null; then
      die "Another installation is at work (process $other)." "Wait for it to end."
    fi
    rm -rf "$PREFIX/lock"
    mkdir "$PREFIX/lock"
  fi
  echo $$ >"$PREFIX/lock/pid"
  trap 'rm -rf "$PREFIX/lock"' EXIT
  trap 'exit 130' INT TERM HUP
}

pip() { "$TARGET/bin/python" -m pip --no-input --disable-pip-version-check "$@" </dev/null >>"$PREFIX/install.log" 2>&1; }

step() {
  say "  $1 …"
  shift
  "$@" && return
  printf '%s: that failed. The last lines of %s:\n' "$PROGRAM" "$PREFIX/install.log" >&2
  tail -n 12 "$PREFIX/install.log" | sed 's/^/    /' >&2
  die "Nothing has changed for the version that was installed before." \
    "Mend what these lines name (most often the network or a full disk), and run this again."
}

make_environment() {
  if [ -n "$UV" ]; then
    "$UV" venv --quiet --seed --python "$PYTHON" "$TARGET" >>"$PREFIX/install.log" 2>&1
  else
    "$PYTHON" -m venv "$TARGET" >>"$PREFIX/install.log" 2>&1
  fi
}

fetch() {
  rm -rf "$PREFIX/download"
  mkdir -p "$PREFIX/download"
  set -- --no-deps --only-binary :all: --dest "$PREFIX/download" "$PACKAGE${VERSION:+==$VERSION}"
  [ -z "$FIND_LINKS" ] || set -- --find-links "$FIND_LINKS" "$@"
  pip download "$@" || return 1
  WHEEL=$(ls "$PREFIX"/download/echo_swarm-*.whl) || return 1
  [ -z "$SHA256" ] || "$TARGET/bin/python" - "$WHEEL" "$SHA256" >>"$PREFIX/install.log" 2>&1 <<'PYTHON'
import hashlib, pathlib, sys
found = hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest()
sys.exit(f"{sys.argv[1]} has the SHA-256 {found}, not {sys.argv[2]}" if found != sys.argv[2].lower() else 0)
PYTHON
}

# The wheel brings the list of what it stands on, with the hash of each file.
install_agent() {
  "$TARGET/bin/python" -m zipfile -e "$WHEEL" "$PREFIX/download/wheel" >>"$PREFIX/install.log" 2>&1 || return 1
  LISTS=$PREFIX/download/wheel/swarm_node/installation
  set -- install --no-deps --require-hashes --use-pep517 -r "$LISTS/node.lock"
  [ -z "$FIND_LINKS" ] || set -- "$@" --find-links "$FIND_LINKS"
  pip "$@" && pip install --no-deps "$WHEEL"
}

install_engine() {
  case $ENGINE in
    torch) pip install --only-binary :all: -c "$LISTS/constraints.txt" torch transformers ;;
    llama)
      case $SYSTEM in Darwin) CMAKE_ARGS='-DGGML_METAL=on -DLLAVA_BUILD=OFF' ;; *) CMAKE_ARGS='-DLLAVA_BUILD=OFF' ;; esac
      export CMAKE_ARGS
      pip install -c "$LISTS/constraints.txt" llama-cpp-python gguf ;;
    vllm) "$TARGET/bin/python" -m venv "$TARGET/vllm" >>"$PREFIX/install.log" 2>&1 &&
      "$TARGET/vllm/bin/python" -m pip --no-input install --no-deps --only-binary :all: --require-hashes \
        -r "$LISTS/vllm.lock" </dev/null >>"$PREFIX/install.log" 2>&1 ;;
  esac
}

engine_modules() {
  case $ENGINE in
    torch) echo 'import torch, transformers' ;;
    llama) echo 'import llama_cpp, gguf' ;;
    *) echo 'pass' ;;
  esac
}

check_itself() {
  "$TARGET/bin/swarm-node" --version >"$PREFIX/download/version" 2>>"$PREFIX/install.log" &&
    "$TARGET/bin/python" -P -c "import swarm_node.p2p.host; $(engine_modules)" >>"$PREFIX/install.log" 2>&1 || return 1
  [ "$ENGINE" != vllm ] || "$TARGET/vllm/bin/python" -c 'import vllm' >>"$PREFIX/install.log" 2>&1
}

# Root's commands look where the service's agent lives, unless told otherwise.
home_of_service() {
  [ "$(id -u)" != 0 ] || printf '%s' "export SWARM_HOME=\"\${SWARM_HOME:-$NODE_HOME}\""
}

# A link is renamed over the other: there is always a whole version under that name. What starts is wholly of one version,
# and so are the engines that it starts later.
switch() {
  rm -f "$PREFIX/current.new"
  ln -s "versions/${TARGET##*/}" "$PREFIX/current.new"
  "$PYTHON" -c 'import os, sys; os.replace(*sys.argv[1:])' "$PREFIX/current.new" "$PREFIX/current"
  mkdir -p "$BIN"
  cat >"$BIN/swarm-node.new" <<TEXT
#!/bin/sh
# Made by the installer of Echo Swarm; \`install.sh --uninstall\` removes it.
here=\$(cd '$PREFIX/current' && pwd -P) || exit 1
$(home_of_service)
[ ! -x "\$here/vllm/bin/python" ] || export SWARM_VLLM_PYTHON="\${SWARM_VLLM_PYTHON:-\$here/vllm/bin/python}"
exec "\$here/bin/swarm-node" "\$@"
TEXT
  chmod 755 "$BIN/swarm-node.new"
  mv -f "$BIN/swarm-node.new" "$BIN/swarm-node"
}

# `PID VERSION COMMAND` of everything that runs out of a version of ours: by its interpreter, which stands first.
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

# `PID COMMAND` of agents that run out of another version than this one; their engines end with them.
agents_but() {
  running | while read -r pid version words; do
    case $version-$words in
      "$1"-*) ;;
      *"-join "* | *"-mirror "*) printf '%s %s\n' "$pid" "${words% }" ;;
    esac
  done
}

# How to end an agent; one that samples ends what it samples first.
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
    say "Process $pid still runs the version from before: swarm-node $words" \
      "  Next:  $(ending "$pid" "$words"), and when it has ended, the same command again."
  done
}

# What is neither the new version, nor the one before it, nor one that runs, goes.
tidy_up() {
  used=$(running | cut -d ' ' -f 2)
  for folder in "$PREFIX"/versions/*; do
    case $folder in "$TARGET" | "$BEFORE") continue ;; esac
    printf '%s\n' "$used" | grep -qxF "${folder##*/}" || rm -rf "$folder"
  done
  rm -rf "$PREFIX/download"
}

install() {
  lock
  BEFORE=$(readlink "$PREFIX/current" 2>/dev/null || true)
  BEFORE=${BEFORE:+$PREFIX/$BEFORE}
  TARGET=$PREFIX/versions/$(date +%Y%m%d-%H%M%S)-$$
  : >"$PREFIX/install.log"
  say "Installing into $PREFIX (details in install.log there):"
  step "an environment of its own, from $PYTHON" make_environment
  step "the newest ${PACKAGE}${VERSION:+, if $VERSION is it}" fetch
  step "the agent and what it stands on, each checked against its hash" install_agent
  [ "$ENGINE" = none ] || step "engine $ENGINE (this is the large part)" install_engine
  step "a check that all of it starts" check_itself
  step "the switch to it" switch
  tidy_up
  say "Installed: $("$BIN/swarm-node" --version)."
}

# A firewall is the owner's to change: this only names the line.
say_port() {
  say "Other nodes fetch from it on TCP port 8703, or the next free one up to 8710. Nothing has to be opened; it helps the round:"
  case $SYSTEM in
    Darwin) say "  macOS asks whether swarm-node may accept connections: allow it" ;;
    *) if command -v firewall-cmd >/dev/null 2>&1; then
        say "  sudo firewall-cmd --permanent --add-port=8703-8710/tcp && sudo firewall-cmd --reload"
      elif command -v nft >/dev/null 2>&1 && ! command -v ufw >/dev/null 2>&1; then
        say "  sudo nft add rule inet filter input tcp dport 8703-8710 accept"
      else
        say "  sudo ufw allow 8703:8710/tcp"
      fi ;;
  esac
  say "To listen nowhere:  swarm-node join … --no-share"
}

say_next() {
  [ -z "$(agents_but "${TARGET##*/}")" ] || return 0
  case :$PATH: in
    *:"$BIN":*) say "Next:  swarm-node join JOIN-STRING" ;;
    *) say "$BIN is not on your PATH. Next:  $BIN/swarm-node join JOIN-STRING" ;;
  esac
}

# --- services ---------------------------------------------------------------------------------------------------------

# Which template of the wheel, and where it goes.
find_service() {
  case $SYSTEM-$(id -u) in
    Darwin-*) TEMPLATE=launchd.plist SERVICE=$HOME/Library/LaunchAgents/org.echo-swarm.node.plist ;;
    *-0) TEMPLATE=system.service SERVICE=/etc/systemd/system/swarm-node.service CONTROL="systemctl" ;;
    *) TEMPLATE=user.service SERVICE=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/swarm-node.service CONTROL="systemctl --user" ;;
  esac
}

install_service() {
  mkdir -p "$(dirname "$SERVICE")"
  folder=$(ls -d "$PREFIX"/current/lib/python3.*/site-packages/swarm_node/installation)
  "$PYTHON" - "$folder/$TEMPLATE" "$SERVICE" "$BIN/swarm-node" "$JOIN" <<'PYTHON'
import pathlib, sys
template, target, program, join = sys.argv[1:]
text = pathlib.Path(template).read_text().replace("@PROGRAM@", program).replace("@JOIN@", join)
pathlib.Path(target).write_text(text)
PYTHON
  say "The service is $SERVICE."
  if [ "$SYSTEM" = Darwin ]; then
    restart_service
  elif $CONTROL daemon-reload 2>/dev/null; then
    $CONTROL enable swarm-node.service
    restart_service
    [ "$(id -u)" = 0 ] || say "It runs while you are logged in; \`loginctl enable-linger\` keeps it running without you."
  else
    say "systemd does not answer here. When it does:  $CONTROL enable --now swarm-node.service"
  fi
}

# One that its owner has stopped, or that runs another installation, is left as it is.
service_runs() {
  grep -qF "$BIN/swarm-node" "$SERVICE" 2>/dev/null || return 1
  case $SYSTEM in
    Darwin) launchctl list org.echo-swarm.node 2>/dev/null | grep -q '"PID"' ;;
    *) $CONTROL is-active --quiet swarm-node.service 2>/dev/null ;;
  esac
}

# The agent that ran gives its leases back, keeps what is finished for the next one to send, and ends.
restart_service() {
  if [ "$SYSTEM" = Darwin ]; then
    launchctl unload "$SERVICE" 2>/dev/null || true
    launchctl load -w "$SERVICE" && say "The service runs it." && return
    die "The new version is installed, but its service did not start again." "launchctl load -w $SERVICE"
  fi
  $CONTROL restart swarm-node.service && say "The service runs it." && return
  die "The new version is installed, but its service did not start again." "$CONTROL status swarm-node.service says why."
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
  [ -e "$PREFIX/versions" ] || [ -e "$BIN/swarm-node" ] || die "Nothing is installed in $PREFIX." "Name the folder with --prefix."
  if [ -n "$DRY_RUN" ]; then
    say "Would remove $PREFIX/{versions,current,lock,download,install.log}, $BIN/swarm-node and the service${PURGE:+, and $NODE_HOME}."
    return
  fi
  remove_service
  [ ! -d "$PREFIX" ] || settle
  agents_but none | {
    if read -r pid words; then
      die "Process $pid still runs it: swarm-node $words" "$(ending "$pid" "$words"), and run this again when it has ended."
    fi
  }
  rm -rf "$PREFIX/versions" "$PREFIX/current" "$PREFIX/current.new" "$PREFIX/download" "$PREFIX/lock" "$PREFIX/install.log"
  if grep -q 'installer of Echo Swarm' "$BIN/swarm-node" 2>/dev/null; then rm -f "$BIN/swarm-node"; fi
  rmdir "$PREFIX" 2>/dev/null || true
  if [ -n "$PURGE" ]; then
    rm -rf "$NODE_HOME"
    say "Removed, with the node's keys."
  elif [ -d "$NODE_HOME" ]; then
    say "Removed. The node's keys and receipts are still in $NODE_HOME."
  else
    say "Removed."
  fi
}

main() {
  parse "$@"
  find_system
  find_service
  if [ "$ACTION" = uninstall ]; then uninstall; return; fi
  find_python
  find_engine
  check_disk
  say "Engine:   $ENGINE ($WHY)"
  say "Python:   $PYTHON${UV:+, environments by $UV}"
  say "Place:    $PREFIX, about $wanted_mb MB of $free_mb free; command $BIN/swarm-node"
  if [ -n "$JOIN" ]; then
    say "Service:  $SERVICE"
  elif service_runs; then
    say "Service:  $SERVICE, which leaves cleanly and starts again with the new version"
  fi
  if [ -n "$DRY_RUN" ]; then say "That is all it would do; nothing was changed."; return; fi
  install
  if [ -n "$JOIN" ]; then
    install_service
  elif service_runs; then
    restart_service
  else
    say_next
  fi
  say_port
  tell_of_agents
}

main "$@"
