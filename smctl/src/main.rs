//! smctl: the operator's tool of xsmc.
//!
//! Exit codes: 0 all well; 1 something is wrong and was said on standard error (`status`,
//! `linkgroup`: a node did not answer; `config check`: the file has problems; `device`: none can be used; `enable
//! --status`: it is not enabled); 2 wrong use of smctl. `run` becomes the program, so its exit code is
//! the program's, except 125: smctl could not prepare the run, 126: the program can't be executed,
//! 127: it was not found.

mod config;
mod device;
mod elf;
mod enable;
mod find;
mod linkgroup;
mod output;
mod reasons;
mod run;
mod status;
mod table;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "smctl",
    version,
    about = "Run programs under xsmc and see what it does for them"
)]
#[command(
    after_help = "Exit codes: 0 all well, 1 something is wrong, 2 wrong use; run: the \
    program's own, or 125 could not prepare, 126 can't execute, 127 not found"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program under xsmc
    Run(run::Args),
    /// Show the processes under xsmc, their connections and what carries them
    Status(status::Args),
    /// Let processes use the SMC option of TCP, by which hosts find each other (root, once a boot)
    Enable(enable::EnableArgs),
    /// Undo enable
    Disable,
    /// Check or explain the policy file
    #[command(subcommand)]
    Config(config::Command),
    /// List RDMA devices, which of them can be used, and why not the others
    Device(device::Args),
    /// List the SMC-R link groups with processes of other hosts
    Linkgroup(linkgroup::Args),
    /// List the reasons why a connection stays on TCP
    Reasons(reasons::Args),
}

fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::Run(args) => return run::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Enable(args) => enable::enable(&args),
        Command::Disable => enable::disable(),
        Command::Config(command) => config::run(&command),
        Command::Device(args) => device::run(&args),
        Command::Linkgroup(args) => linkgroup::run(&args),
        Command::Reasons(args) => reasons::run(&args),
    };
    match outcome {
        Ok(code) => code,
        // The reader of a pipe has seen enough: no reason to complain.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("smctl: can't write to standard output: {e}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn arguments_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_program_keeps_its_own_options() {
        let args = Args::try_parse_from([
            "smctl",
            "run",
            "--log",
            "debug",
            "redis-server",
            "--log",
            "x",
        ]);
        let Ok(Args {
            command: Command::Run(run),
        }) = args
        else {
            panic!("not a run")
        };
        assert_eq!(run.app, ["redis-server", "--log", "x"]);
        let args = Args::try_parse_from(["smctl", "run", "--", "-odd"]);
        let Ok(Args {
            command: Command::Run(run),
        }) = args
        else {
            panic!("not a run")
        };
        assert_eq!(run.app, ["-odd"]);
        assert!(Args::try_parse_from(["smctl", "run"]).is_err());
    }
}
