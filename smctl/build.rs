//! Compiles bpf/option.bpf.c with clang; smctl embeds the result and loads it on `smctl enable`.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

const SOURCE: &str = "bpf/option.bpf.c";

fn main() {
    println!("cargo:rerun-if-changed={SOURCE}");
    println!("cargo:rerun-if-env-changed=CLANG");
    if let Err(problem) = compile() {
        eprintln!("error: {problem}");
        exit(1);
    }
}

fn compile() -> Result<(), String> {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    let out = env::var("OUT_DIR").map(PathBuf::from);
    let out = out.map_err(|e| format!("OUT_DIR: {e}"))?;
    let target = match env::var("CARGO_CFG_TARGET_ENDIAN").as_deref() {
        Ok("big") => "bpfeb",
        _ => "bpfel",
    };
    let mut command = Command::new(&clang);
    command
        .args(["-target", target, "-mcpu=v2", "-O2", "-g"])
        .args(["-Wall", "-Wextra", "-Werror"])
        // The result depends on the source alone, not on the folder it was built in.
        .args(["-fdebug-compilation-dir=.", "-c", SOURCE, "-o"])
        .arg(out.join("option.bpf.o"));
    // Debian keeps <asm/types.h>, which <linux/bpf.h> needs, in a folder that is named by the machine.
    if let Ok(machine) = env::var("CARGO_CFG_TARGET_ARCH") {
        command.arg(format!("-idirafter/usr/include/{machine}-linux-gnu"));
    }
    let output = command.output().map_err(|e| {
        format!(
            "can't run {clang}, which compiles {SOURCE}: {e}\n\
             install clang (Debian: apt-get install clang linux-libc-dev), or name it by CLANG"
        )
    })?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{clang} can't compile {SOURCE} ({}); clang 14 or later with the target bpf and the kernel's \
         headers are needed (Debian: apt-get install clang linux-libc-dev)\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    ))
}
