//! The `kvferry` program. See `kvferry --help`.

fn main() -> std::process::ExitCode {
    kvferry::cli::main()
}
