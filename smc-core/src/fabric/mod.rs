//! What a link is made of. One fabric so far: [`shm`], for two processes of one host.

pub mod mapping;
pub mod shm;
pub mod verbs;
