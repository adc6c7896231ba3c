//! Reading the person's repository, and writing candidates beside it.

use crate::support::{Place, RECIPE};
use hone_agent::branch::{self, Files};
use hone_agent::scope::Scope;
use hone_runs::Class;
use std::fs;

fn changed(path: &str, text: &str) -> Files {
    Files::from([(path.to_string(), Some(text.to_string()))])
}

#[test]
fn a_candidate_is_a_function_of_its_content() {
    let (place, twin) = (Place::usual(), Place::usual());
    let files = changed("recipe/recipe.yaml", "lr: 0.2\n");
    let make = |place: &Place| {
        let workspace = place.workspace();
        branch::write(&workspace, &workspace.head().unwrap(), &files, "Raise lr", "hone/c1/r001-raise-lr").unwrap()
    };
    let first = make(&place);
    assert_eq!(make(&place), first);
    assert_eq!(make(&twin), first);
    assert_eq!(first.name(), "r001-raise-lr");
    let repository = git2::Repository::open(place.root()).unwrap();
    let commit = repository.find_commit(git2::Oid::from_str(&first.commit).unwrap()).unwrap();
    assert_eq!((commit.time().seconds(), commit.time().offset_minutes()), (1_700_000_001, 0));
    assert_eq!(commit.author().to_string(), "Hone <hone@localhost>");
}

#[test]
fn nothing_of_the_persons_is_touched() {
    let place = Place::usual();
    place.write("README.md", "work in progress\n");
    place.write("staged.txt", "staged\n");
    let repository = git2::Repository::open(place.root()).unwrap();
    let mut index = repository.index().unwrap();
    index.add_path("staged.txt".as_ref()).unwrap();
    index.write().unwrap();
    let before = place.belongings();
    let mut seen = git2::StatusOptions::new();
    seen.include_untracked(true).include_ignored(false);
    let mut status = || -> Vec<_> {
        let statuses = repository.statuses(Some(&mut seen)).unwrap();
        statuses.iter().map(|s| (s.path().unwrap().to_string(), s.status())).collect()
    };
    let was = status();

    let workspace = place.workspace();
    let head = workspace.head().unwrap();
    let candidate =
        branch::write(&workspace, &head, &changed("recipe/new.yaml", "a: 1\n"), "m", "hone/c1/r001-x").unwrap();
    branch::publish(&workspace, &candidate.branch, &candidate.commit).unwrap();
    branch::advance(&workspace, "hone/c1/kept", &[], &candidate.commit).unwrap();
    workspace.export(&candidate.commit, &workspace.runs_path("c1").join("r001-x/tree")).unwrap();
    workspace.prepare().unwrap();

    assert_eq!(place.belongings(), before);
    assert_eq!(status(), was);
    assert_eq!(workspace.head().unwrap(), head);
}

#[test]
fn an_edit_without_effect_is_no_candidate() {
    let workspace = Place::usual();
    let workspace = workspace.workspace();
    let refused =
        branch::write(&workspace, &workspace.head().unwrap(), &changed("recipe/recipe.yaml", RECIPE), "m", "b")
            .unwrap_err();
    assert_eq!(refused.class, Class::Agent);
}

#[test]
fn a_branch_is_made_once_and_never_taken_over() {
    let place = Place::usual();
    let workspace = place.workspace();
    let head = workspace.head().unwrap();
    let one = branch::write(&workspace, &head, &changed("recipe/a", "1"), "m", "hone/c1/r001-a").unwrap();
    let two = branch::write(&workspace, &head, &changed("recipe/a", "2"), "m", "hone/c1/r001-a").unwrap();
    branch::publish(&workspace, &one.branch, &one.commit).unwrap();
    branch::publish(&workspace, &one.branch, &one.commit).unwrap();
    assert_eq!(branch::publish(&workspace, &two.branch, &two.commit).unwrap_err().class, Class::Integrity);
    assert_eq!(branch::tip(&workspace, "hone/c1/r001-a").unwrap(), Some(one.commit.clone()));

    branch::advance(&workspace, "hone/c1/kept", &[], &head).unwrap();
    branch::advance(&workspace, "hone/c1/kept", std::slice::from_ref(&head), &one.commit).unwrap();
    branch::advance(&workspace, "hone/c1/kept", std::slice::from_ref(&head), &one.commit).unwrap();
    let moved = branch::advance(&workspace, "hone/c1/kept", std::slice::from_ref(&head), &two.commit).unwrap_err();
    assert_eq!(moved.class, Class::Integrity);
    assert_eq!(branch::tip(&workspace, "hone/c1/kept").unwrap(), Some(one.commit));
}

/// Git's lock on a ref outlives the process that held it.
#[test]
fn a_lock_that_a_killed_process_left_is_waited_for_then_removed() {
    let place = Place::usual();
    let workspace = place.workspace();
    let head = workspace.head().unwrap();
    let folder = place.root().join(".git/refs/heads/hone/c1");
    let left = |name: &str| {
        fs::create_dir_all(&folder).unwrap();
        let lock = folder.join(format!("{name}.lock"));
        fs::write(&lock, "").unwrap();
        lock
    };
    let locks = [left("r001-a"), left("kept")];
    branch::publish(&workspace, "hone/c1/r001-a", &head).unwrap();
    branch::advance(&workspace, "hone/c1/kept", &[], &head).unwrap();
    assert!(locks.iter().all(|lock| !lock.exists()));

    let passing = left("r002-b");
    let holder = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(150));
        fs::remove_file(&passing).is_ok()
    });
    branch::publish(&workspace, "hone/c1/r002-b", &head).unwrap();
    assert!(holder.join().unwrap(), "a live holder's lock is its own to remove");
    assert_eq!(branch::tip(&workspace, "hone/c1/r002-b").unwrap(), Some(head));
}

#[test]
fn modes_survive_and_files_come_and_go() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::usual();
    let workspace = place.workspace();
    let head = workspace.head().unwrap();
    let files = Files::from([
        ("recipe/deep/new.txt".to_string(), Some("new\n".to_string())),
        ("recipe/recipe.yaml".to_string(), None),
    ]);
    let candidate = branch::write(&workspace, &head, &files, "m", "b").unwrap();
    let to = place.root().join("runs/x/tree");
    workspace.export(&candidate.commit, &to).unwrap();
    assert_eq!(fs::read_to_string(to.join("recipe/deep/new.txt")).unwrap(), "new\n");
    assert!(!to.join("recipe/recipe.yaml").exists());
    assert_eq!(workspace.differences(&candidate.commit, &to).unwrap(), Vec::<String>::new());

    fs::write(to.join("README.md"), "tampered\n").unwrap();
    fs::write(to.join("added"), "").unwrap();
    fs::remove_file(to.join("goal.yaml")).unwrap();
    fs::set_permissions(to.join("evals/add.yaml"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(
        workspace.differences(&candidate.commit, &to).unwrap(),
        ["README.md", "added", "evals/add.yaml", "goal.yaml"]
    );

    let diff = branch::diff(&workspace, &head, &candidate.commit).unwrap();
    assert!(diff.contains("+new") && diff.contains("deleted file mode 100644") && diff.contains("-lr: 0.1"), "{diff}");
}

#[test]
fn protected_content_has_a_hash_that_edits_in_scope_leave() {
    let place = Place::usual();
    let workspace = place.workspace();
    let head = workspace.head().unwrap();
    let scope = Scope::new(&["recipe/**".into()], &["goal.yaml".into()]).unwrap();
    let hash = |commit: &str| workspace.protected_hash(commit, |p| scope.allows(p)).unwrap();
    let inside = branch::write(&workspace, &head, &changed("recipe/recipe.yaml", "lr: 9\n"), "m", "b").unwrap();
    let outside = branch::write(&workspace, &head, &changed("evals/add.yaml", "easy\n"), "m", "b").unwrap();
    assert_eq!(hash(&inside.commit), hash(&head));
    assert_ne!(hash(&outside.commit), hash(&head));
}

#[test]
fn a_revert_takes_out_one_change_and_leaves_the_rest() {
    let place = Place::new(&[("a", "1\n"), ("b", "1\n"), ("c", "1\n")]);
    let workspace = place.workspace();
    let base = workspace.head().unwrap();
    let grow =
        |parent: &str, path: &str| branch::write(&workspace, parent, &changed(path, "2\n"), path, "b").unwrap().commit;
    let a = grow(&base, "a");
    let b = grow(&a, "b");
    let c = grow(&b, "c");
    assert_eq!(branch::revert(&workspace, &c, &b, &c, "m").unwrap(), b);
    let without = branch::revert(&workspace, &c, &a, &b, "Take b out").unwrap();
    let text = |path: &str| workspace.text(&without, path).unwrap();
    assert_eq!((text("a"), text("b"), text("c")), ("2\n".into(), "1\n".into(), "2\n".into()));
    let again = branch::write(&workspace, &c, &changed("a", "3\n"), "m", "b").unwrap().commit;
    assert_eq!(branch::revert(&workspace, &again, &base, &a, "m").unwrap_err().class, Class::Usage);
}

#[test]
fn what_is_not_committed_is_seen() {
    let place = Place::usual();
    let workspace = place.workspace();
    let asked: Vec<String> = ["goal.yaml", "recipe/recipe.yaml", "recipe/untracked.yaml"].map(String::from).into();
    assert!(workspace.uncommitted(&asked).unwrap().is_empty());
    place.write("goal.yaml", "goal: other\n");
    place.write("recipe/untracked.yaml", "");
    assert_eq!(workspace.uncommitted(&asked).unwrap(), ["goal.yaml", "recipe/untracked.yaml"]);
}

#[test]
fn a_folder_without_a_repository_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let failure = hone_agent::workspace::Workspace::discover(folder.path()).unwrap_err();
    assert_eq!(failure.class, Class::Usage);
    assert!(failure.hint.unwrap().contains("git init"));
}

#[test]
fn slugs_are_short_and_plain() {
    assert_eq!(branch::branch_name(17, "Raise `lr`: 0.1 → 0.2!"), "r017-raise-lr-0-1-0-2");
    assert_eq!(branch::branch_name(3, "→"), "r003");
    assert!(branch::branch_name(3, &"long ".repeat(50)).len() <= 45);
}

#[test]
fn fifty_at_once_each_get_a_commit_a_branch_and_a_tree() {
    let place = Place::usual();
    let head = place.workspace().head().unwrap();
    let gate = std::sync::Barrier::new(50);
    std::thread::scope(|scope| {
        for i in 0..50 {
            let (place, head, gate) = (&place, &head, &gate);
            scope.spawn(move || {
                let workspace = place.workspace();
                let files = changed("recipe/recipe.yaml", &format!("lr: 0.{i:02}\n"));
                gate.wait();
                let name = format!("hone/c1/r{i:03}");
                let candidate = branch::write(&workspace, head, &files, "m", &name).unwrap();
                branch::publish(&workspace, &candidate.branch, &candidate.commit).unwrap();
                // Half of them export the trunk to one place, too.
                if i % 2 == 0 {
                    workspace.export(head, &workspace.runs_path("c1").join("trusted/tree")).unwrap();
                }
                let tree = workspace.runs_path("c1").join(format!("r{i:03}/tree"));
                workspace.export(&candidate.commit, &tree).unwrap();
                assert_eq!(workspace.differences(&candidate.commit, &tree).unwrap(), Vec::<String>::new());
                assert_eq!(fs::read_to_string(tree.join("recipe/recipe.yaml")).unwrap(), format!("lr: 0.{i:02}\n"));
                assert_eq!(branch::tip(&workspace, &candidate.branch).unwrap(), Some(candidate.commit));
            });
        }
    });
    let workspace = place.workspace();
    assert_eq!(place.branches().len(), 50);
    assert_eq!(place.branches().values().collect::<std::collections::BTreeSet<_>>().len(), 50);
    let trusted = workspace.runs_path("c1").join("trusted");
    assert_eq!(workspace.differences(&head, &trusted.join("tree")).unwrap(), Vec::<String>::new());
    assert_eq!(fs::read_dir(trusted).unwrap().count(), 1, "no half of an export is left");
}

#[test]
fn a_lock_has_one_holder() {
    let place = Place::usual();
    let workspace = place.workspace();
    let held = workspace.try_lock("c1").unwrap();
    assert_eq!(workspace.try_lock("c1").unwrap_err().class, Class::Usage);
    workspace.try_lock("c2").unwrap();
    drop(held);
    workspace.try_lock("c1").unwrap();
}
