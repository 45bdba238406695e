//! Why a peer declines: the "peer diagnosis information" of a Decline.

macro_rules! diagnoses {
    ($($code:literal $variant:ident $name:literal $sentence:literal;)*) => {
        /// Reason code of a Decline, with Linux's values and names.
        ///
        /// Some are never sent, and only explain one's own fallback: [`Diagnosis::PeerNoSmc`],
        /// [`Diagnosis::OptUnsupp`], [`Diagnosis::PeerDecl`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Diagnosis {
            $(#[doc = $sentence] $variant,)*
            /// A code that isn't in this list. Made by `Diagnosis::from` only.
            Unknown(u32),
        }

        impl Diagnosis {
            /// All known ones, in the order of their codes.
            pub const ALL: &'static [Diagnosis] = &[$(Diagnosis::$variant),*];

            /// Linux's short name; "unknown" for [`Diagnosis::Unknown`].
            pub const fn name(self) -> &'static str {
                match self {
                    $(Diagnosis::$variant => $name,)*
                    Diagnosis::Unknown(_) => "unknown",
                }
            }

            /// One sentence for people.
            pub const fn sentence(self) -> &'static str {
                match self {
                    $(Diagnosis::$variant => $sentence,)*
                    Diagnosis::Unknown(_) => "The peer gave a reason that this version doesn't know.",
                }
            }
        }

        impl From<u32> for Diagnosis {
            fn from(code: u32) -> Diagnosis {
                match code {
                    $($code => Diagnosis::$variant,)*
                    code => Diagnosis::Unknown(code),
                }
            }
        }

        impl From<Diagnosis> for u32 {
            fn from(diagnosis: Diagnosis) -> u32 {
                match diagnosis {
                    $(Diagnosis::$variant => $code,)*
                    Diagnosis::Unknown(code) => code,
                }
            }
        }
    };
}

diagnoses! {
    0x0101_0000 Mem "MEM"
        "Memory for the connection could not be had.";
    0x0201_0000 TimeoutCl "TIMEOUT_CL"
        "The other side's CONFIRM LINK did not arrive in time, so the RDMA path does not work.";
    0x0202_0000 TimeoutAl "TIMEOUT_AL"
        "The other side's ADD LINK did not arrive in time.";
    0x0300_0000 CnfErr "CNFERR"
        "The configuration or a value in a message does not allow SMC.";
    0x0301_0000 PeerNoSmc "PEERNOSMC"
        "The peer did not send the TCP option that announces SMC.";
    0x0302_0000 Ipsec "IPSEC"
        "The connection uses IPsec.";
    0x0303_0000 NoSmcDev "NOSMCDEV"
        "No device for SMC was found, or the two hosts have no enterprise id (UEID) in common.";
    0x0303_0001 NoSmcDDev "NOSMCDDEV"
        "No SMC-D device was found.";
    0x0303_0002 NoSmcRDev "NOSMCRDEV"
        "No SMC-R device was found, or none with a route to the peer's RoCE address.";
    0x0303_0003 NoIsm2Supp "NOISM2SUPP"
        "The host has no support for ISM version 2.";
    0x0303_0004 NoV2Ext "NOV2EXT"
        "The Proposal of version 2 lacks its extension.";
    0x0303_0005 NoV2DExt "NOV2DEXT"
        "The Proposal of version 2 lacks its SMC-D extension.";
    0x0303_0006 NoSeid "NOSEID"
        "The system enterprise id (SEID) is not enabled or absent.";
    0x0303_0007 NoSmcD2Dev "NOSMCD2DEV"
        "No SMC-D version 2 device was found.";
    0x0303_0008 NoUeid "NOUEID"
        "The Proposal lists no enterprise id (UEID).";
    0x0303_0009 ReleaseErr "RELEASEERR"
        "The two sides did not agree on a release of SMC version 2.";
    0x0303_000a MaxConnErr "MAXCONNERR"
        "The number of connections per link group is out of range or was not repeated.";
    0x0303_000b MaxLinkErr "MAXLINKERR"
        "The number of links per link group is out of range or was not repeated.";
    0x0304_0000 ModeUnsupp "MODEUNSUPP"
        "The answer is for SMC-D where SMC-R was asked for, or the reverse.";
    0x0305_0000 RmbeEc "RMBE_EC"
        "The peer wants eyecatchers in RMB elements, which are not supported.";
    0x0306_0000 OptUnsupp "OPTUNSUPP"
        "The program uses a socket option that SMC does not support.";
    0x0307_0000 DiffPrefix "DIFFPREFIX"
        "The client is in another IP subnet, which SMC version 1 does not allow.";
    0x0308_0000 GetVlanErr "GETVLANERR"
        "The VLAN of the connection could not be found out.";
    0x0309_0000 IsmVlanErr "ISMVLANERR"
        "The VLAN could not be registered with the ISM device.";
    0x030a_0000 NoActLink "NOACTLINK"
        "The link group has no active link.";
    0x030b_0000 NoSrvLink "NOSRVLINK"
        "The Accept names a link that the client's link group does not have.";
    0x030c_0000 VersMismat "VERSMISMAT"
        "The two sides speak different versions of SMC.";
    0x030d_0000 MaxDmb "MAX_DMB"
        "The SMC-D device has no buffer left.";
    0x030e_0000 NoRoute "NOROUTE"
        "There is no route to the peer's RoCE address.";
    0x030f_0000 NoIndirect "NOINDIRECT"
        "The peer reaches this host through a gateway, but this host has none on its way to the peer.";
    0x0400_0000 SyncErr "SYNCERR"
        "The server continues a link group that the client no longer has, usually after a restart.";
    0x0500_0000 PeerDecl "PEERDECL"
        "The peer declined.";
    0x0999_0000 IntErr "INTERR"
        "An internal error occurred.";
    0x0999_0001 ErrRtok "ERR_RTOK"
        "The peer's RMB could not be filed, because the table of the link group is full.";
    0x0999_0002 ErrRdyLnk "ERR_RDYLNK"
        "The queue pair could not be made ready.";
    0x0999_0003 ErrRegBuf "ERR_REGBUF"
        "The RMB could not be registered, or the peer did not confirm its rkey in time.";
}

impl core::fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} ({:#010x})", self.name(), u32::from(*self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn codes_and_names_are_unique_and_round_trip() {
        let mut names = HashSet::new();
        let mut last = 0;
        for &diagnosis in Diagnosis::ALL {
            let code = u32::from(diagnosis);
            assert!(code > last, "{diagnosis}");
            last = code;
            assert_eq!(Diagnosis::from(code), diagnosis);
            assert!(names.insert(diagnosis.name()));
            assert!(diagnosis.sentence().ends_with('.'));
        }
        assert_eq!(Diagnosis::ALL.len(), 36);
        assert_eq!(Diagnosis::from(7), Diagnosis::Unknown(7));
        assert_eq!(u32::from(Diagnosis::Unknown(7)), 7);
        assert_eq!(
            Diagnosis::from(0x0303_0000).to_string(),
            "NOSMCDEV (0x03030000)"
        );
    }
}
