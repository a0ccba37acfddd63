<#
.SYNOPSIS
Installs the Echo Swarm node agent on Windows, inside WSL 2.

.DESCRIPTION
The agent, vLLM and llama.cpp's CUDA build want Linux; WSL 2 gives them one, with the graphics card. This script looks
whether WSL is ready, hands everything else to install.sh inside it, and leaves a command swarm-node.cmd on this side.
It needs no administrator, and changes nothing before it has said what it found.

.PARAMETER Distribution
The WSL distribution to install into; by default the one that WSL starts by itself.

.PARAMETER DryRun
Say what would be done, and do nothing.

.PARAMETER Uninstall
Remove what was installed; the node's keys stay, unless -Purge is given as well.

.PARAMETER Rest
Options of install.sh, passed on as they are: --engine, --version, --sha256, …

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
            'As administrator:  wsl --install',
            'Restart, open the new distribution once, and run this again.')
    }
    $Kernel = & wsl.exe @(Get-WslArgument) uname -r 2>$null
    if ($LASTEXITCODE -ne 0) {
        Stop-Installation 'WSL has no distribution that starts.' @(
            'wsl --install -d Debian',
            'Open it once to make a user, and run this again.')
    }
    if ("$Kernel" -notmatch 'WSL2|microsoft-standard') {
        Stop-Installation "This distribution runs under WSL 1 ($Kernel), which has no graphics card." @(
            'wsl --set-version <distribution> 2')
    }
}

function Get-Script {
    $Beside = Join-Path $PSScriptRoot 'install.sh'
    if (-not (Test-Path -LiteralPath $Beside)) {
        Stop-Installation 'install.sh is not beside this script.' @('Download both into one folder.')
    }
    $Translated = & wsl.exe @(Get-WslArgument) wslpath -a ($Beside -replace '\\', '/')
    if ($LASTEXITCODE -ne 0) { Stop-Installation "WSL cannot read $Beside." @('Copy both scripts to a local disk.') }
    return "$Translated".Trim()
}

function Write-Command {
    New-Item -ItemType Directory -Force -Path $CommandFolder | Out-Null
    # Without --exec, WSL hands the line to the distribution's shell, which knows where the agent is.
    $Target = (@('wsl.exe') + (Get-WslArgument) + @('PATH="$HOME/.local/bin:$PATH"', 'swarm-node', '%*')) -join ' '
    Set-Content -LiteralPath $CommandFile -Encoding ascii -Value @('@echo off', 'rem Made by the installer of Echo Swarm.', $Target)
    Write-Output "The command is $CommandFile."
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
        Write-Output 'Other nodes fetch from it on TCP port 8703, or the next free one up to 8710. Nothing has to be opened.'
        Write-Output 'To be reached, run as administrator, and forward the port to WSL or mirror its network (.wslconfig):'
        Write-Output '  netsh advfirewall firewall add rule name="Echo Swarm node" dir=in action=allow protocol=TCP localport=8703-8710'
        Write-Output 'To listen nowhere:  swarm-node join JOIN-STRING --no-share'
    }
}
