<#
.SYNOPSIS
Installs the Echo Swarm node agent on Windows, inside WSL 2.

.DESCRIPTION
The agent, vLLM and llama.cpp's CUDA build need Linux. WSL 2 provides it, with access to the GPU. This script checks WSL,
runs install.sh inside it, and creates the command swarm-node.cmd in Windows. It needs no administrator rights, and checks
the requirements before it changes anything.

.PARAMETER Distribution
The WSL distribution to install into; default: WSL's default distribution.

.PARAMETER DryRun
Print what would be done, and change nothing.

.PARAMETER Uninstall
Remove the installation. The node's keys are kept, unless -Purge is also given.

.PARAMETER Rest
Options of install.sh, passed on unchanged: --engine, --version, --sha256, …

.EXAMPLE
powershell -ExecutionPolicy Bypass -File install.ps1 -DryRun

.EXAMPLE
powershell -ExecutionPolicy Bypass -File install.ps1 --engine torch
#>
[CmdletBinding()]
param(
    [string] $Distribution = '',
    [switch] $DryRun,
    [switch] $Uninstall,
    [switch] $Purge,
    [Parameter(ValueFromRemainingArguments = $true)]
    [string[]] $Rest = @()
)

Set-StrictMode -Version Latest
$ErrorActionPreference = 'Stop'

$CommandFolder = Join-Path $env:LOCALAPPDATA 'echo-swarm'
$CommandFile = Join-Path $CommandFolder 'swarm-node.cmd'

function Stop-Installation {
    param([string] $Message, [string[]] $NextSteps = @())
    [Console]::Error.WriteLine("install.ps1: $Message")
    foreach ($Step in $NextSteps) { [Console]::Error.WriteLine("  $Step") }
    exit 1
}

function Get-WslArgument {
    if ($Distribution) { return @('-d', $Distribution, '--') }
    return @('--')
}

function Test-Wsl {
    if (-not (Get-Command wsl.exe -ErrorAction SilentlyContinue)) {
        Stop-Installation 'The agent runs inside WSL 2, which is not installed.' @(
            'Run as administrator:  wsl --install',
            'Restart, open the new distribution once, then run this again.')
    }
    $Kernel = & wsl.exe @(Get-WslArgument) uname -r 2>$null
    if ($LASTEXITCODE -ne 0) {
        Stop-Installation 'No WSL distribution can be started.' @(
            'Run:  wsl --install -d Debian',
            'Open it once to create a user, then run this again.')
    }
    if ("$Kernel" -notmatch 'WSL2|microsoft-standard') {
        Stop-Installation "This distribution runs under WSL 1 ($Kernel), which cannot use the GPU." @(
            'Run:  wsl --set-version <distribution> 2')
    }
}

function Get-Script {
    $Beside = Join-Path $PSScriptRoot 'install.sh'
    if (-not (Test-Path -LiteralPath $Beside)) {
        Stop-Installation 'install.sh is not in the same folder as this script.' @('Download both into one folder.')
    }
    $Translated = & wsl.exe @(Get-WslArgument) wslpath -a ($Beside -replace '\\', '/')
    if ($LASTEXITCODE -ne 0) { Stop-Installation "WSL cannot read $Beside." @('Copy both scripts to a local disk, then run this again.') }
    return "$Translated".Trim()
}

function Write-Command {
    New-Item -ItemType Directory -Force -Path $CommandFolder | Out-Null
    # Without --exec, WSL passes the line to the distribution's shell, which finds the agent on its PATH.
    $Target = (@('wsl.exe') + (Get-WslArgument) + @('PATH="$HOME/.local/bin:$PATH"', 'swarm-node', '%*')) -join ' '
    Set-Content -LiteralPath $CommandFile -Encoding ascii -Value @('@echo off', 'rem Created by the installer of Echo Swarm.', $Target)
    Write-Output "Command: $CommandFile"
}

Test-Wsl
$Script = Get-Script
$Options = @($Rest)
if ($DryRun) { $Options += '--dry-run' }
if ($Uninstall) { $Options += '--uninstall' }
if ($Purge) { $Options += '--purge' }

& wsl.exe @(Get-WslArgument) sh $Script @Options
if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }
if (-not $DryRun) {
    if ($Uninstall) {
        if (Test-Path -LiteralPath $CommandFile) { Remove-Item -LiteralPath $CommandFile }
    }
    else {
        Write-Command
        Write-Output 'Other nodes fetch from this node on TCP port 8703, or the next free port up to 8710. Opening the port is optional.'
        Write-Output 'To open it, forward the port to WSL or mirror its network (.wslconfig), and run as administrator:'
        Write-Output '  netsh advfirewall firewall add rule name="Echo Swarm node" dir=in action=allow protocol=TCP localport=8703-8710'
        Write-Output 'To open no port:  swarm-node join JOIN-STRING --no-share'
    }
}
