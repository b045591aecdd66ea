//! Two macros: [`section!`] declares a map with known keys, [`choices!`] an enum of names.

/// Declares a section: a struct with one public field per key, its defaults, its reader, its documentation and its support checks.
///
/// Each key has: its documentation, `field`, optionally `as "key"` if the key is not a Rust identifier, optionally `[required]`,
/// the type, the default and the [`SupportLevel`]. Then optionally `shown "…"` (the documented default when it depends on other
/// keys) and `input Kind` (the value may be a path). `rare` lists keys without a typed field. `finish` normalises and
/// validates a section after reading; `check` reports unsupported values.
macro_rules! section {
    (
        $(#[$meta:meta])*
        pub struct $Name:ident($title:literal) {
            $(
                $(#[doc = $doc:literal])*
                $field:ident $(as $key:literal)? $([$required:ident])? : $ty:ty = $default:expr, $status:expr
                $(, shown $shown:literal)? $(, input $input:ident)?;
            )*
        }
        $(rare { $( $rare:literal => $rare_status:expr; )* })?
        $(finish = $finish:path;)?
        $(check = $check:path;)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        pub struct $Name {
            $(
                $(#[doc = $doc])*
                $(#[serde(rename = $key)])?
                pub $field: $ty,
            )*
            /// Rarely used keys that the config sets, by name. They have no typed field.
            #[serde(skip_serializing_if = "std::collections::BTreeMap::is_empty")]
            pub rare: std::collections::BTreeMap<String, serde_json::Value>,
        }

        impl Default for $Name {
            fn default() -> Self {
                Self { $( $field: $default, )* rare: std::collections::BTreeMap::new() }
            }
        }

        impl $Name {
            /// The section's name.
            pub const TITLE: &'static str = $title;
            const KEYS: &'static [&'static str] = &[$( $crate::job::declare::section!(@key $field $($key)?) ),*];
            const RARE: &'static [(&'static str, $crate::job::schema::SupportLevel)] = {
                #[allow(unused_imports)]
                use $crate::job::schema::SupportLevel::*;
                &[$($( ($rare, $rare_status) ),*)?]
            };

            /// Describes every key: its meaning, its default and its status in this release.
            #[must_use]
            pub fn describe() -> $crate::job::schema::SectionInfo {
                #[allow(unused_imports)]
                use $crate::job::schema::{FieldInfo, FieldValue, SupportLevel::*};
                let mut fields = Vec::new();
                $({
                    #[allow(unused_mut, unused_assignments)]
                    let mut default = <$ty as FieldValue>::show(&{ let value: $ty = $default; value });
                    $( default = String::from($shown); )?
                    $( default = String::from(stringify!($required)); )?
                    fields.push(FieldInfo {
                        key: $crate::job::declare::section!(@key $field $($key)?),
                        kind: <$ty as FieldValue>::kind(),
                        default,
                        doc: concat!("" $(, $doc)*).trim().to_owned(),
                        status: $status,
                        rare: false,
                        nested: <$ty as FieldValue>::section(),
                        values: <$ty as FieldValue>::values(),
                        input: None $( .or(Some($crate::job::schema::InputKind::$input)) )?,
                    });
                })*
                for &(key, status) in Self::RARE {
                    fields.push(FieldInfo {
                        key,
                        kind: "any".into(),
                        default: String::new(),
                        doc: String::new(),
                        status,
                        rare: true,
                        nested: None,
                        values: Vec::new(),
                        input: None,
                    });
                }
                $crate::job::schema::SectionInfo { title: $title, fields }
            }
        }

        impl $crate::job::schema::FieldValue for $Name {
            const HAS_CHECKS: bool = true;
            const HAS_INPUTS: bool = true;

            fn kind() -> String {
                format!("map, see `{}`", $title)
            }

            fn read(node: &$crate::job::node::Node, cx: &mut $crate::job::schema::ReadContext) -> Option<Self> {
                let entries = cx.read_map(node, $title)?;
                #[allow(unused_mut)]
                let mut section = Self::default();
                $(
                    cx.read_key(
                        entries,
                        $title,
                        $crate::job::declare::section!(@key $field $($key)?),
                        false $( || { let _ = stringify!($required); true } )?,
                        &mut section.$field,
                    );
                )*
                let rare: Vec<&str> = Self::RARE.iter().map(|(key, _)| *key).collect();
                cx.read_other_keys(entries, $title, Self::KEYS, &rare, &mut section.rare);
                $( $finish(&mut section, &$crate::job::schema::ReadContext::present_keys(entries), cx); )?
                Some(section)
            }

            fn show(&self) -> String {
                if *self == Self::default() { "{}".into() } else { "{…}".into() }
            }

            fn is_falsy(&self) -> bool {
                *self == Self::default()
            }

            fn check_support(&self, path: &str, report: &mut $crate::job::schema::SupportReport) {
                #[allow(unused_imports)]
                use $crate::job::schema::SupportLevel::*;
                $({
                    let default: $ty = $default;
                    report.check_field(path, $crate::job::declare::section!(@key $field $($key)?), $status, &self.$field, &default);
                })*
                for &(key, status) in Self::RARE {
                    if let Some(value) = self.rare.get(key) {
                        report.check_rare_key(path, key, status, value);
                    }
                }
                $( $check(self, path, report); )?
            }

            fn collect_inputs(&self, path: &str, out: &mut Vec<$crate::job::schema::Input>) {
                #[allow(unused_imports)]
                use $crate::job::schema::{FieldValue, Input, InputKind, SupportLevel::*, join};
                $(if $status.opens_paths() {
                    const KEY: &str = $crate::job::declare::section!(@key $field $($key)?);
                    if <$ty as FieldValue>::HAS_INPUTS {
                        self.$field.collect_inputs(&join(path, KEY), out);
                    }
                    $(
                        self.$field.for_each_text(&mut |subpath, text| {
                            if !text.is_empty() {
                                out.push(Input {
                                    config_path: text.to_owned(),
                                    kind: InputKind::$input,
                                    key: format!("{}{subpath}", join(path, KEY)),
                                });
                            }
                        });
                    )?
                })*
            }

            fn section() -> Option<$crate::job::schema::SectionInfo> {
                Some(Self::describe())
            }
        }
    };
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:literal) => { $key };
}
pub(crate) use section;

/// Declares an enum of names, each with a [`SupportLevel`]. Names are matched without regard to case.
macro_rules! choices {
    (
        $(#[$meta:meta])*
        pub enum $Name:ident($what:literal) {
            $(
                $(#[doc = $doc:literal])*
                $variant:ident = $name:literal $(| $alias:literal)*, $status:expr;
            )*
        }
        $(normalise = $normalise:path;)?
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $Name {
            $(
                $(#[doc = $doc])*
                #[serde(rename = $name)]
                $variant,
            )*
        }

        impl $Name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name used in configs.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// The status of this value in this release.
            #[must_use]
            pub fn status(self) -> $crate::job::schema::SupportLevel {
                #[allow(unused_imports)]
                use $crate::job::schema::SupportLevel::*;
                match self { $(Self::$variant => $status),* }
            }

            /// The names to choose from: a name that is refused is not one.
            pub(crate) fn usable_names() -> Vec<&'static str> {
                let is_refused = |value: &Self| matches!(value.status(), $crate::job::schema::SupportLevel::Refused(_));
                let usable = Self::ALL.iter().filter(|value| !is_refused(value));
                usable.map(|value| value.name()).collect()
            }

            /// The value with this name or alias, without regard to case.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                let lower = name.to_ascii_lowercase();
                #[allow(unused_variables)]
                let word = lower.as_str();
                $( let word = $normalise(word); )?
                $( if word == $name.to_ascii_lowercase() $(|| word == $alias)* { return Some(Self::$variant); } )*
                None
            }
        }

        impl std::fmt::Display for $Name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl $crate::job::schema::FieldValue for $Name {
            const HAS_CHECKS: bool = true;

            fn kind() -> String {
                format!("name of a {}", $what)
            }

            fn read(node: &$crate::job::node::Node, cx: &mut $crate::job::schema::ReadContext) -> Option<Self> {
                $crate::job::values::read_choice(node, cx, $what, &Self::usable_names(), Self::from_name)
            }

            fn show(&self) -> String {
                self.name().into()
            }

            fn is_falsy(&self) -> bool {
                false
            }

            fn check_support(&self, path: &str, report: &mut $crate::job::schema::SupportReport) {
                report.add_status(path, self.status(), self.name());
            }

            fn values() -> Vec<(&'static str, $crate::job::schema::SupportLevel)> {
                Self::ALL.iter().map(|value| (value.name(), value.status())).collect()
            }
        }
    };
}
pub(crate) use choices;
